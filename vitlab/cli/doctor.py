"""``vitlab doctor``: check whether this machine can train, and say what to do where it cannot."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import requires
from pathlib import Path
from typing import Literal, NamedTuple

from vitlab.cli.lines import show_rows
from vitlab.config.arguments import CommandParser, add_formats
from vitlab.config.trust import FORCED
from vitlab.errors import named_line, one_line
from vitlab.runs.directory import RUNS
from vitlab.runs.machine import installed_versions

PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "timm", "jsonargparse", "safetensors")
MORE = (
    *("fsspec", "jinja2", "matplotlib", "numpy", "pandas", "pillow", "pyarrow", "pyyaml"),
    *("rich", "scikit-learn", "scipy", "tqdm", "wandb"),
)
KNOWN_BAD: dict[str, list[tuple[str, str]]] = {  # package: [versions, what is wrong with them]
    "torch": [("<2.10", "CVE-2026-24747: a weights_only file can run code; install torch>=2.10")],
    "lightning": [
        ("==2.6.2", "malware (GHSA-w37p-236h-pfx3): remove it, and change every password this machine holds"),
        ("==2.6.3", "malware (GHSA-w37p-236h-pfx3): remove it, and change every password this machine holds"),
        ("<2.6.6", "CVE-2026-58659; install lightning>=2.6.6,<2.7"),
        (">=2.7", "not tested with vitlab; install lightning>=2.6.6,<2.7"),
    ],
    "pillow": [("<12.2", "GHSA-whj4-6x5x-4v2j; install pillow>=12.2")],
    "jsonargparse": [(">=5", "does not work with Lightning 2.6; install jsonargparse>=4.52,<5")],
}
ALL_REDUCE = "from vitlab.cli.doctor import all_reduce; all_reduce()"
LEAST_DISK = 2  # GB


class Checked(NamedTuple):
    """The result of one check.

    Args:
        state: ``ok``; ``note`` for something worth knowing; ``wrong`` for something that prevents training.
        name: What was checked.
        text: The result, and the way out.
    """

    state: Literal["ok", "note", "wrong"]
    name: str
    text: str


def main(argv: list[str]) -> int:
    """Run ``vitlab doctor``; the exit code is 1 if something is wrong."""
    parser = CommandParser(
        "vitlab doctor",
        description="Check versions, devices, communication between processes, Weights & Biases, and the disk.",
        epilog="Exit code: 0 if nothing is wrong, else 1.",
    )
    add_formats(parser)
    form = parser.parse_args(argv).form
    wrong, rows = 0, []
    for check in CHECKS:
        for finding in _findings(check):
            wrong += finding.state == "wrong"
            rows.append(finding._asdict())
            if not form:
                sys.stdout.write(f"{finding.state:<6} {finding.name:<13} {finding.text}\n")
                sys.stdout.flush()
    if form:
        show_rows(rows, form)
    else:
        sys.stdout.write(f"\n{wrong} wrong\n" if wrong else "\nnothing is wrong\n")
    return 1 if wrong else 0


def _findings(check: Callable[[], Iterator[Checked]]) -> Iterator[Checked]:
    try:
        yield from check()
    except Exception as error:  # a package that is missing or broken must not hide what the other checks find
        yield Checked("wrong", check.__name__, f"the check failed: {named_line(error)}")


def versions() -> Iterator[Checked]:
    """Compare installed versions with those known to be bad, without importing anything."""
    python = platform.python_version()
    old = sys.version_info < (3, 11)
    yield Checked("wrong" if old else "ok", "python", f"{python}; vitlab needs 3.11 or newer" if old else python)
    for title, names in (("packages", PACKAGES), ("", MORE)):
        good, found = [], installed_versions(names)
        for name in names:
            if name not in found:
                yield Checked("wrong", name, "is missing; run `make setup` or `pip install -c constraints.txt -e .`")
                continue
            reasons = [why for rule, why in KNOWN_BAD.get(name, []) if _matches(found[name], rule)]
            if reasons:
                yield Checked("wrong", name, f"{found[name]}: {reasons[0]}")
            else:
                good.append(f"{name} {found[name]}")
        yield Checked("ok", title, ", ".join(good))


def _matches(version: str, rule: str) -> bool:
    found = re.fullmatch(r"(<|>=|==)([\d.]+)", rule)
    assert found
    ours, theirs = _numbers(version), _numbers(found[2])
    return {"<": ours < theirs, ">=": ours >= theirs, "==": ours == theirs}[found[1]]


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[\d.]*\d", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    return tuple((*numbers, 0, 0, 0)[:3])


def torchvision_build() -> Iterator[Checked]:
    """Import torchvision, whose package says for which versions of torch it was compiled."""
    try:
        import torch
        import torchvision
    except Exception as error:  # a wrong pair fails in many ways: ImportError, RuntimeError, OSError
        text = f"torchvision does not import: {one_line(error)}; install the versions in constraints.txt"
        yield Checked("wrong", "torchvision", text)
        return
    text = f"torch {torch.__version__} with torchvision {torchvision.__version__}"
    lines = requires("torchvision") or []  # as "torch==2.10.0" or "torch (>=2.14.0)"
    rules = [found[1] for line in lines if (found := re.match(r"torch[ (]*((?:<|>=|==)[\d.]+)", line))]
    if missed := [rule for rule in rules if not _matches(torch.__version__, rule)]:
        yield Checked("wrong", "torchvision", f"{text}: this torchvision needs torch{missed[0]}")
    else:
        yield Checked("ok", "torchvision", text)


def devices() -> Iterator[Checked]:
    """List the devices that torch can use."""
    import torch

    yield Checked("ok", "cpu", f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        kind = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16: use 32-true"
        yield Checked("ok", f"gpu {i}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, {kind}")
    if torch.backends.mps.is_available():
        yield Checked("ok", "gpu", "Apple MPS")
    elif not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            text = "there is a driver, but torch sees no GPU: is torch a CPU build, or the driver too old?"
            yield Checked("wrong", "gpu", f"{text} (torch {torch.__version__}, built for CUDA {torch.version.cuda})")
        else:
            yield Checked("note", "gpu", "none; configs/t2t.yaml and configs/vit.yaml need none")


def processes(seconds: float = 300.0) -> Iterator[Checked]:
    """Run an all-reduce over two processes, as training on two devices does.

    Args:
        seconds: How long they may take, with the import of torch, which is slow on a busy machine.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", ALL_REDUCE, f"{folder}/store"]
        started = [
            subprocess.Popen([*words, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for rank in (0, 1)
        ]
        try:
            outputs = [process.communicate(timeout=seconds)[0].decode().strip() for process in started]
        except subprocess.TimeoutExpired:
            outputs = [f"no answer within {seconds:g} s"]
        finally:
            for process in started:
                process.kill()
                process.communicate()
    ends = [output.splitlines()[-1:] for output in outputs]  # torch 2.10 says more before
    if any(process.returncode for process in started) or ends != [["3.0"], ["3.0"]]:
        text = f"an all-reduce over two processes failed: {ends[0]}; if a firewall is why, try GLOO_SOCKET_IFNAME=lo"
        yield Checked("wrong", "gloo", text)
    else:
        yield Checked("ok", "gloo", "an all-reduce over two processes works")


def all_reduce() -> None:
    """Add 1 and 2 over two processes and print the sum; ``sys.argv`` holds the store and the rank."""
    import torch
    import torch.distributed as dist

    store, rank = sys.argv[1], int(sys.argv[2])
    most = timedelta(seconds=60)  # to connect
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=most)
    number = torch.tensor([rank + 1.0])
    dist.all_reduce(number)
    sys.stdout.write(f"{number.item()}\n")
    dist.destroy_process_group()


def loading() -> Iterator[Checked]:
    """Report the setting that lets checkpoints run code."""
    if os.environ.get(FORCED):
        text = f"{FORCED}={os.environ[FORCED]}: checkpoints could run code; unset it"
        yield Checked("wrong", "checkpoints", text)
    else:
        yield Checked("ok", "checkpoints", "are read without running code")


def wandb_mode() -> Iterator[Checked]:
    """Report where metrics go besides metrics.jsonl."""
    from vitlab.jobs.train.wandb import has_key

    mode = os.environ.get("WANDB_MODE")
    if mode:
        yield Checked("ok", "W&B", f"{mode}, by WANDB_MODE")
    elif has_key():
        yield Checked("ok", "W&B", "online: an API key is stored")
    else:
        yield Checked("note", "W&B", "offline: no API key; log in with `wandb login`")


def disk() -> Iterator[Checked]:
    """Write where runs go; report the free space there and in shared memory."""
    place = RUNS if RUNS.is_dir() else Path()
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield Checked("wrong", "disk", f"cannot write into {place.resolve()}: {one_line(error)}")
        return
    free = shutil.disk_usage(place).free / 1e9
    text = f"{free:,.1f} GB free in {place.resolve()}"
    low = f"{text}: a checkpoint of ViT-S/16 takes 0.3 GB, and a run writes three at a time"
    yield Checked("wrong", "disk", low) if free < LEAST_DISK else Checked("ok", "disk", text)
    shared = Path("/dev/shm")  # Linux: loader processes pass their batches through it
    if shared.is_dir() and (left := shutil.disk_usage(shared).free / 1e9) < 1:
        text = f"{left:.2f} GB free in {shared}: loader processes may crash (in a container: --shm-size=8g)"
        yield Checked("note", "shared memory", text)


CHECKS: tuple[Callable[[], Iterator[Checked]], ...] = (
    versions,
    torchvision_build,
    devices,
    processes,
    loading,
    wandb_mode,
    disk,
)
