"""Several processes, started from outside by torchrun or srun, agree on one name for their run."""

import hashlib
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from vitlab.errors import UsageError
from vitlab.runs.directory import RUNS, write_text
from vitlab.runs.processes import runs

PATIENCE = 300.0  # seconds that a process waits for the first one, and the first for all
MET = threading.Event()  # of the processes of a run: from then on they watch each other
_own: Any = None  # the store of this group of processes: its server ends with the last who holds it


def launched_rank() -> int:
    """Return which process of a launch by torchrun or srun this is; 0 for a process on its own."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def launch(run: Path) -> None:
    """Tell the processes that Lightning will start from this one whose they are."""
    os.environ |= {"VITLAB_RUN_DIR": str(run.resolve()), "VITLAB_LAUNCHER": str(os.getpid())}


def follow() -> None:
    """End this process if Lightning has started it and who did dies before they have met: it would wait for long."""

    def look(launcher: int, met: threading.Event) -> None:
        while not met.wait(1.0):
            if not runs(launcher):
                os._exit(1)
                return  # a test may stand in for it

    if "VITLAB_LAUNCHER" in os.environ:
        threading.Thread(target=look, args=(int(os.environ["VITLAB_LAUNCHER"]), MET), daemon=True).start()


def launched_devices(devices: Any, num_nodes: int) -> dict[str, int]:
    """Return how many devices and machines torchrun has started processes for; nothing outside of torchrun.

    Lightning takes `devices: auto` to be one on a CPU, and each of the processes would train alone.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    if str(devices).isdigit() and int(devices) != local:
        raise UsageError(
            f"`trainer.devices` must be torchrun's --nproc_per_node or be left out, got {devices}, {local}"
        )
    if num_nodes not in (1, world // local):
        raise UsageError(f"`trainer.num_nodes` must be torchrun's --nnodes or be left out, got {num_nodes}")
    return {"num_nodes": world // local, **({"devices": local} if devices == "auto" else {})}


def is_restarted() -> bool:
    """Return whether torchrun has started this group of processes again after one was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def agreed() -> str | None:
    """Return the name that this launch has agreed on before torchrun started its processes again; None if none."""
    store, key = _elastic_store()
    return store.get(key).decode() if store.check([key]) else None


def agree(name: str) -> str:
    """Return the ``name`` that the first process of this launch has given."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _by_store(name)
    if "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        return _by_file(name)
    return name


def _by_store(name: str) -> str:
    """Ask the store that torchrun itself keeps for the time of this launch."""
    store, key = _elastic_store()
    if launched_rank() == 0:  # the first name stays: who is started again continues the run
        store.compare_set(key, "", name)
    return store.get(key).decode()


def _elastic_store() -> tuple[Any, str]:
    from torch.distributed import TCPStore

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return store, f"vitlab/run/{os.environ['TORCHELASTIC_RUN_ID']}"


def meet_apart() -> None:
    """Give the processes that torchrun has started together a store of their own, and wait until all are there.

    torchrun keeps one store for all its groups: one that it starts again would find the addresses of the group before
    (pytorch/pytorch#135712). Its counts of restarts differ between machines, so each process asks with a new word.

    Raises:
        UsageError: A process did not come within ``PATIENCE``.
    """
    global _own
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    from torch.distributed import TCPStore

    (store, key), host, rank = _elastic_store(), os.environ["MASTER_ADDR"], launched_rank()
    asks = [f"{key}/asks/{other}" for other in range(1, int(os.environ["WORLD_SIZE"]))]
    until = time.monotonic() + PATIENCE
    if rank == 0:
        _own = TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        while missing := [ask for ask in asks if not _own.check([ask])]:
            for ask in missing:
                if store.check([ask]):
                    store.set(f"{key}/port/{store.get(ask).decode()}", str(_own.port))
            _wait(until, "process 0", f"process {missing[0].rpartition('/')[2]} to join")
    else:
        word = uuid.uuid4().hex
        store.set(asks[rank - 1], word)
        while not store.check([f"{key}/port/{word}"]):
            _wait(until, f"process {rank}", "process 0 to join")
        _own = TCPStore(host, int(store.get(f"{key}/port/{word}")), is_master=False)
        _own.set(asks[rank - 1], word)
    os.environ |= {"MASTER_PORT": str(_own.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _wait(until: float, who: str, what: str) -> None:
    if time.monotonic() > until:
        raise UsageError(f"{who} waited {PATIENCE:.0f} s in vain for {what}")
    time.sleep(0.05)


def _by_file(name: str) -> str:
    """Use a file that only this job step of SLURM has."""
    words = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    key = ":".join(os.environ.get(word, "") for word in words)
    path = RUNS / ".launch" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if launched_rank() == 0:
        write_text(path, name)
        return name
    until = time.monotonic() + PATIENCE
    while not path.is_file():
        _wait(until, f"process {launched_rank()}", "process 0 to name the run")
    return path.read_text()
