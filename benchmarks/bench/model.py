"""``vitlab bench model``: images per second of networks against each other."""

import copy
import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from bench import process_of
from bench.networks import OWN_WEIGHTS, build, contenders, difference, ours
from bench.pairs import IN_A_ROW, Work, canary, compare, interleave, is_noisy
from vitlab.layers.compiled import compile_parts
from vitlab.models.cost import count_macs

Mode = Literal["fwd", "train"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GOALS = {  # speed relative to the plain way, float32 on a CPU
    ("t2t_vit_7", "fwd"): 1.25,
    ("t2t_vit_7", "train"): 1.20,
    ("t2t_vit_14", "fwd"): 1.08,
    ("t2t_vit_14", "train"): 1.07,
    ("t2t_vit_t_14", "fwd"): 1.35,
    ("t2t_vit_t_14", "train"): 1.20,
}


class Case(NamedTuple):
    """A case: a network of :data:`NETWORKS`, forward pass or training step, precision and batch size."""

    model: str
    mode: Mode
    dtype: str
    batch: int


class Unequal(RuntimeError):
    """Two networks that should be equal differ, so their speeds cannot be compared."""


SUITES = {
    "cpu-quick": [
        Case("t2t_vit_7", "fwd", "fp32", 4),
        Case("t2t_vit_7", "train", "fp32", 4),
        Case("cifar_vit", "train", "fp32", 32),
    ],
    "cpu-full": [
        Case(model, mode, dtype, 32 if model == "cifar_vit" else 4)
        for model in ("t2t_vit_7", "t2t_vit_14", "t2t_vit_t_14", "vit_s16", "cifar_vit")
        for dtype in DTYPES
        for mode in ("fwd", "train")
    ],
    "gpu": [
        Case(model, mode, "bf16", 1024 if model == "cifar_vit" else 256)
        for model in ("vit_s16", "vit_b16", "t2t_vit_7", "t2t_vit_14", "t2t_vit_t_14", "cifar_vit")
        for mode in ("fwd", "train")
    ],
}


def measure(
    case: Case,
    peers: list[str],
    rounds: int,
    budget: float,
    device: str = "cpu",
    compiled: bool = False,
    t2t_repo: str | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each contender of a case, the reference first."""
    names, missing = contenders(case.model, peers, t2t_repo)
    nets = {name: build(case.model, name, t2t_repo).to(device) for name in names}
    images = torch.randn(case.batch, 3, *ours(case.model).img_size, device=device)
    errors = {name: _check_equal(name, net, nets["vitlab"], images[:2]) for name, net in nets.items()}
    if compiled:
        nets |= {f"{name} compiled": compiled_as_used(name, net) for name, net in nets.items()}
    works = {name: step(net, images, case) for name, net in nets.items()}
    firsts = {name: first_steps(work, device) for name, work in works.items()}
    works["canary"], canary_flops = canary(DTYPES[case.dtype], device)
    times = interleave(works, rounds, budget, in_a_row=IN_A_ROW[device])
    noisy = is_noisy(times["canary"])
    found = compare(times, names[0])
    rate = canary_flops / found.pop("canary")["seconds"]
    flops = 2 * count_macs(ours(case.model)) * (3 if case.mode == "train" else 1)
    rows = []
    for name, row in found.items():
        speed = case.batch / row["seconds"]
        row |= {"images_per_second": speed, "best_images_per_second": case.batch / row["best_seconds"]}
        row |= {"gflops": flops * speed / 1e9, "share_of_canary": flops * speed / rate, "noisy": noisy}
        row |= {"logit_difference": errors.get(name.removesuffix(" compiled")), "base": names[0], "missing": missing}
        rows.append({**case._asdict(), "contender": name, **row, **firsts[name], "all_seconds": times[name]})
        if device == "cuda":
            rows[-1]["memory_batch"] = case.batch
    return rows


def first_steps(work: Work, device: str) -> dict[str, float]:
    """Take the first step, which compiles, and return its seconds; on a GPU also the MiB that another step adds."""
    begin = time.perf_counter()
    work()
    if device != "cuda":
        return {"first_seconds": time.perf_counter() - begin}
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return {"first_seconds": seconds, "memory": (torch.cuda.max_memory_allocated() - before) / 2**20}


def compiled_as_used(name: str, net: nn.Module) -> nn.Module:
    """Return a network compiled as its users would: ours part by part, others as one graph."""
    if name != "vitlab":
        return cast(nn.Module, torch.compile(net))
    net = copy.deepcopy(net)
    compile_parts(net)
    return net


def step(net: nn.Module, images: torch.Tensor, case: Case) -> Work:
    """Return the work to time: a forward pass, or forward, loss, backward and a step of fused AdamW."""
    device = images.device.type
    autocast = torch.autocast(device, DTYPES[case.dtype], enabled=case.dtype != "fp32")
    if case.mode == "fwd":
        net.eval()

        def forward() -> None:
            with torch.no_grad(), autocast:
                net(images)

        return forward
    net.train()
    targets = torch.arange(len(images), device=device) % 10
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)

    def train() -> None:
        with autocast:
            loss = F.cross_entropy(net(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return train


def too_slow(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each ratio clearly below 90 % of its goal, if the machine was quiet."""
    for row in rows:
        goal = GOALS.get((row["model"], row["mode"])) if row["dtype"] == "fp32" else None
        if goal and row["contender"] == "vitlab" and not row["noisy"] and row["interval"][1] < 0.9 * goal:
            yield f"{row['model']} {row['mode']}: {row['ratio']:.2f} x the plain implementation, the goal is {goal}"


def add_memory(rows: list[dict[str, Any]], case: Case, t2t_repo: str | None = None) -> None:
    """Measure the memory of our network and of the reference, at a batch that dwarfs the weights."""
    case = case._replace(batch=max(case.batch, 8))
    for row in rows:
        if row["contender"] in ("vitlab", "official", row["base"]):
            row |= {"memory": memory(case, row["contender"], t2t_repo), "memory_batch": case.batch}


def memory(case: Case, contender: str, t2t_repo: str | None = None) -> float:
    """Return the peak memory of a case in MiB beyond the imports, in a separate process."""
    arguments = [case.model, case.mode, case.dtype, str(case.batch), contender, *([t2t_repo] if t2t_repo else [])]
    words, environment = process_of("memory")
    output = subprocess.run([*words, *arguments], env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])["mib"]


def _check_equal(name: str, net: nn.Module, base: nn.Module, images: torch.Tensor) -> float | None:
    if name in OWN_WEIGHTS:
        return None
    found = difference(net, base, images)
    if not found <= (2e-5 if name == "official" else 1e-5):
        raise Unequal(f"the logits of {name} and vitlab differ by {found:.1e} with the same weights")
    return found
