"""``vitlab bench limit``: the peak rates of the machine, and the speed of networks that they allow."""

from typing import Any

import torch

from bench.model import DTYPES
from bench.networks import ours
from bench.pairs import canary, timed
from vitlab.models.cost import count_macs

MODELS = ("vit_ti16", "vit_s16", "vit_b16", "t2t_vit_7", "t2t_vit_14", "t2t_vit_t_14", "cifar_vit")


def measure(rounds: int, device: str = "cpu") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the best rates of matrix products and of copying, and the images per second that the products allow."""
    rates, best = [], {}
    side = 8192 if device == "cuda" else 1024
    for name, dtype in DTYPES.items():
        work, flops = canary(dtype, device, side)
        best[name] = flops / min(timed(work) for _ in range(rounds + 2)) / 1e9
        rates.append({"what": f"{name} product of {side} x {side}", "rate": best[name], "unit": "GFLOP/s"})
    x, y = torch.randn(2**24, device=device), torch.empty(2**24, device=device)
    seconds = min(timed(lambda: y.copy_(x)) for _ in range(rounds + 2))
    rates.append({"what": "copy of 64 MiB, read and write", "rate": 2 * x.nbytes / seconds / 1e9, "unit": "GB/s"})
    rows = []
    for model in MODELS:
        gflop = 2 * count_macs(ours(model)) / 1e9
        row = {f"{name}_{mode}": best[name] / gflop / n for name in DTYPES for mode, n in (("fwd", 1), ("train", 3))}
        rows.append({"model": model, "gflop": gflop, **row})
    return rates, rows
