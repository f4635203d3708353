"""Where the time of a training step goes, in float32 and under autocast to bfloat16: products, attention, casts.

See ``COMMAND``. The time of an operator is its own, without that of the operators that it calls.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import vitlab
from bench.report import machine_line
from vitlab.runs.machine import facts

COMMAND = "python benchmarks/operators.py"
STEPS = 5
CASES = (("vit_s16", 8), ("t2t_vit_7", 8), ("t2t_vit_14", 4), ("t2t_vit_t_14", 4))  # network, batch of 224 x 224
KINDS = {
    "products": ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "convolution", "einsum"),
    "attention": ("scaled_dot_product",),
    "casts and copies": ("copy_", "_to_copy", "to", "clone", "contiguous", "cat", "stack"),
    "normalization": ("layer_norm", "native_layer_norm"),
    "activation": ("gelu", "softmax", "exp", "relu"),
    "windows": ("im2col", "col2im", "unfold", "fold"),
}


def kind_of(operator: str) -> str:
    """Return the row of ``KINDS`` that an operator of ATen counts in.

    >>> kind_of("aten::_scaled_dot_product_flash_attention_for_cpu"), kind_of("aten::addmm"), kind_of("aten::mul")
    ('attention', 'products', 'else')
    """
    name = operator.removeprefix("aten::").removeprefix("_")
    for kind, starts in KINDS.items():
        if any(name.startswith(start) for start in starts):
            return kind
    return "products" if name.startswith(("mkldnn", "onednn")) else "else"


def times(name: str, batch: int, dtype: str) -> Counter[str]:
    """Return the CPU microseconds of ``STEPS`` forward and backward passes by kind, and under "step" their sum."""
    torch.manual_seed(0)
    net = vitlab.create_model(name, num_classes=1000).train()
    images, targets = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = torch.nn.functional.cross_entropy(net(images), targets)
        loss.backward()  # type: ignore[no-untyped-call]

    step()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(STEPS):
            step()
    found: Counter[str] = Counter()
    for event in recorded.key_averages():
        if event.key.startswith("aten::"):
            found[kind_of(event.key)] += event.self_cpu_time_total
            found["step"] += event.self_cpu_time_total
    return found


def main() -> None:
    """Measure, and write the table."""
    kinds = [*KINDS, "else"]
    text = [
        "# Where a training step's time goes",
        "",
        f"Share of the CPU time of torch's operators in {STEPS} forward and backward passes at 224 x 224 pixels, in "
        "percent, and the time of a step in float32 relative to bfloat16 (autocast). In bfloat16, attention may run as "
        f"products. {machine_line(facts())}. `{COMMAND} FILE`.",
        "",
        "| network | dtype | " + " | ".join(kinds) + " | fp32 / bf16 |",
        "|---|---|" + "---|" * (len(kinds) + 1),
    ]
    for name, batch in CASES:
        found = {dtype: times(name, batch, dtype) for dtype in ("fp32", "bf16")}
        for dtype, each in found.items():
            shares = " | ".join(f"{100 * each[kind] / each['step']:.1f}" for kind in kinds)
            gain = f"{found['fp32']['step'] / each['step']:.2f}"
            text.append(f"| {name} | {dtype} | {shares} | {gain} |")
    Path(sys.argv[1]).write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
