"""How long training waits for a checkpoint of ViT-S with Adam's moments: in one process, and in two that share it.

All kinds in turn, so that a busy machine slows each: ``python benchmarks/checkpoint.py benchmarks/checkpoint.md``.
"""

import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

import vitlab
from vitlab.config.strategies import _flat, _shard
from vitlab.runs.generations import WRITING, BackgroundCheckpointIO, rotate, snapshot
from vitlab.runs.shards import write_shards

ROUNDS = 5
BLOCKING, BACKGROUND = "until it is on the disk", "in the background"


def trained(shard=lambda net: None):
    """Return a network that has made a step, and its optimizer."""
    net = vitlab.create_model("vit_s16")
    shard(net)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.zeros(1, 3, 224, 224)).sum().backward()
    optimizer.step()
    return net, optimizer


def alone(folder: Path) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each save of one process, by kind, and the bytes of one."""
    net, optimizer = trained()
    content = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    waits: dict[str, list[float]] = {BLOCKING: [], BACKGROUND: []}
    for step in range(2 * ROUNDS):
        kind = list(waits)[step % 2]
        files = BackgroundCheckpointIO()
        files.finish = partial(rotate, folder, ["last"], {"step": step})
        started = time.perf_counter()
        files.save_checkpoint(content, folder / WRITING)
        if kind == BLOCKING:
            files.wait()
        waits[kind].append(time.perf_counter() - started)
        files.wait()
    snapshot(content, copies := {})
    return waits, sum(copy.nbytes for copy in copies.values())


def shared(rank: int, folder: Path) -> None:
    """Leave, in a file, the seconds of each save of two processes that shard their network, by kind."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    writers = dist.new_group(backend="gloo")
    net, optimizer = trained(partial(_shard, mesh=dist.init_device_mesh("cpu", (2,))))
    waits: dict[str, list[float]] = {
        f"{form}, {k}": [] for form in ("whole", "sharded") for k in (BLOCKING, BACKGROUND)
    }
    for step in range(4 * ROUNDS):
        kind, files = list(waits)[step % 4], BackgroundCheckpointIO()
        dist.barrier()
        started = time.perf_counter()
        options = StateDictOptions(full_state_dict="whole" in kind, cpu_offload=True)
        weights, moments = (
            get_model_state_dict(net, options=options),
            get_optimizer_state_dict(net, optimizer, options=options),
        )
        if "sharded" in kind:
            parts = {k: v.detach().clone() for k, v in _flat({"state_dict": weights}, [moments["state"]]).items()}
            files.begin(partial(write_shards, parts, folder / f"{step}", rank, writers), folder / WRITING, 0)
        elif rank == 0:
            files.save_checkpoint({"state_dict": weights, "optimizer_states": [moments]}, folder / WRITING)
        if BLOCKING in kind:
            assert files.wait() is None
        dist.barrier()
        waits[kind].append(time.perf_counter() - started)
        assert files.wait() is None
        if rank == 0:
            shutil.rmtree(folder / f"{step}", ignore_errors=True)
    if rank == 0:
        torch.save(waits, folder / "waits")
    dist.destroy_process_group()


def table(waits: dict[str, list[float]]) -> list[str]:
    """Return lines of markdown; ratios are medians over the rounds, each against the first kind of its round."""
    lines = ["| written | median, s | shortest | longest | times shorter |", "|---|---|---|---|---|"]
    first = next(iter(waits.values()))
    for kind, seconds in waits.items():
        ratio = statistics.median(a / b for a, b in zip(first, seconds, strict=True))
        lines.append(
            f"| {kind} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {ratio:.1f} |"
        )
    return lines


def main() -> None:
    """Measure, and write the tables."""
    with tempfile.TemporaryDirectory(dir=".") as place:
        folder = Path(place).absolute()
        one, size = alone(folder)
        mp.spawn(shared, (folder,), nprocs=2)
        two = torch.load(folder / "waits")
    lines = [
        "# What training waits for a checkpoint",
        "",
        f"ViT-S with Adam's moments, {size / 1e6:.0f} MB; all kinds of a table in turn, {ROUNDS} times, on one machine "
        f"with {torch.get_num_threads()} threads: `python benchmarks/checkpoint.py FILE`. Ratios: medians over rounds.",
        "",
        "One process; in the background, writing costs the host a copy of the state in memory:",
        "",
        *table(one),
        "",
        "Two processes that shard the network (`fsdp2`), to one disk. *Whole*: the first process gathers and writes "
        "everything. *Sharded*: each writes its own part (`torch.distributed.checkpoint`), which is what vitlab does, "
        "in the background:",
        "",
        *table(two),
    ]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
