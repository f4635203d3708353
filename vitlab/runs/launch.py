"""Coordinate the processes of one run, started by torchrun, srun or Lightning."""

import hashlib
import os
import time
import uuid
from pathlib import Path
from typing import Any, TypeVar

from vitlab.errors import UsageError
from vitlab.runs.atomic import write_text
from vitlab.runs.directory import RUNS

T = TypeVar("T")
PATIENCE = 300.0  # seconds that a process waits for process 0, and process 0 for all
_own: Any = None  # the store of this group of processes; keeps its server alive


def launched_rank() -> int:
    """Return the rank of this process in a launch by torchrun or srun; 0 for a single process."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def is_first() -> bool:
    """Return whether this process is a single one, or the first of those that torchrun, srun or Lightning started."""
    return launched_rank() == 0 and int(os.environ.get("LOCAL_RANK") or 0) == 0


def is_leader() -> bool:
    """Return whether this process of a launch manages the run directory."""
    return launched_rank() == 0 and "VITLAB_RUN_DIR" not in os.environ


def check_launch() -> None:
    """Refuse one process in a SLURM job of several tasks, as it would wait for the others in vain."""
    tasks, name = os.environ.get("SLURM_NTASKS", "1"), os.environ.get("SLURM_JOB_NAME")
    started = "SLURM_STEP_ID" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_RANK" in os.environ
    if tasks.isdigit() and int(tasks) > 1 and not started and name not in ("bash", "interactive"):
        raise UsageError(
            f"this SLURM job has {tasks} tasks (SLURM_NTASKS), and vitlab was started once: put srun before it, or use "
            "`vitlab submit`; for one process, ask for one task or `unset SLURM_NTASKS`"
        )


def is_launched() -> bool:
    """Return whether this process is one of several that torchrun, srun or Lightning started."""
    tasks = os.environ.get("SLURM_NTASKS") if "SLURM_STEP_ID" in os.environ else None
    return int(os.environ.get("WORLD_SIZE") or tasks or 1) > 1


def announce_run(run: Path) -> None:
    """Pass the run directory to the processes that Lightning will start from this one."""
    os.environ |= {"VITLAB_RUN_DIR": str(run.resolve()), "VITLAB_LAUNCHER": str(os.getpid())}


def launched_devices(devices: Any, num_nodes: int) -> dict[str, int]:
    """Return the numbers of devices and machines that torchrun uses; empty outside of torchrun.

    Lightning reads `devices: auto` as one device on a CPU, and each process would train alone.

    Raises:
        UsageError: The configuration asks for other numbers than torchrun.
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


def others_of(rank: int, world: int) -> str:
    """Return how messages call the processes that one of several waits for.

    Example:
        >>> others_of(0, 2), others_of(0, 3), others_of(2, 3)
        ('process 1 of 2', 'processes 1 to 2 of 3', 'process 0 of 3')
    """
    if rank:
        return f"process 0 of {world}"
    return f"process 1 of {world}" if world == 2 else f"processes 1 to {world - 1} of {world}"


def meeting_place() -> str:
    """Return where the processes of a run meet: what a launcher says, or the first node of a SLURM job."""
    address, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not address and (nodes := os.environ.get("SLURM_NODELIST")):
        from lightning.fabric.plugins.environments import SLURMEnvironment

        address, port = SLURMEnvironment.resolve_root_node_address(nodes), str(SLURMEnvironment().main_port)
    return f"{address or '127.0.0.1'}{port and ':'}{port}"


def is_restarted() -> bool:
    """Return whether torchrun restarted this group of processes after losing one."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def agreed() -> str | None:
    """Return the run name that this launch agreed on before torchrun restarted it; None if there is none."""
    store, key = _elastic_store()
    return store.get(key).decode() if store.check([key]) else None


def agree(name: str) -> str:
    """Return the ``name`` that process 0 of this launch gave."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _by_store(name)
    if "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        return _by_file(name)
    return name


def is_connected() -> bool:
    """Return whether this process is in a group, through which processes exchange tensors and objects.

    Example:
        >>> is_connected()
        False
    """
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def of_all(value: T) -> list[T]:
    """Return an object of each process of the group, in their order; all of them must call it.

    Example:
        >>> of_all("alone")
        ['alone']
    """
    from torch import distributed

    if not is_connected():
        return [value]
    found = [value] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def first_to_say(text: str) -> bool:
    """Return whether no other process of this run has said ``text``; each of them may find the same mistake."""
    from torch import distributed

    if not is_connected():
        return True
    try:
        return distributed.distributed_c10d._get_default_store().add(f"vitlab/said/{text}", 1) == 1
    except RuntimeError:  # process 0, which keeps the store, has ended, and said why
        return False


def is_about_peers(error: BaseException) -> bool:
    """Return whether an error is of the communication with other processes.

    Example:
        >>> is_about_peers(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711"))
        True
    """
    text = f"{type(error).__name__} {error}".lower()
    words = ("gloo", "nccl", "connection", "socket", "distbackend", "timed out")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def lost_peer(error: BaseException) -> str | None:
    """Return a line about another process of this command that has ended; None for any other error.

    Example:
        >>> lost_peer(RuntimeError("Connection closed by peer"))  # of a process that is in no group
    """
    if is_about_peers(error) and is_connected():
        return "another process of this command has ended, or cannot be reached: see what it has said"
    return None


def _by_store(name: str) -> str:
    """Agree through the store that torchrun keeps during this launch."""
    store, key = _elastic_store()
    if launched_rank() == 0:  # the first name stays, so that a restart continues the run
        store.compare_set(key, "", name)
    return store.get(key).decode()


def _elastic_store() -> tuple[Any, str]:
    from torch.distributed import TCPStore

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return store, f"vitlab/run/{os.environ['TORCHELASTIC_RUN_ID']}"


def join_group_store() -> None:
    """Give the processes that torchrun started together a store of their own, and wait until all have joined.

    torchrun keeps one store for all its groups: a restarted group would find the addresses of the one before
    (pytorch/pytorch#135712). Its counts of restarts differ between machines, so each process asks with a random token.

    Raises:
        UsageError: A process did not join within ``PATIENCE``.
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
        token = uuid.uuid4().hex
        store.set(asks[rank - 1], token)
        while not store.check([f"{key}/port/{token}"]):
            _wait(until, f"process {rank}", "process 0 to join")
        _own = TCPStore(host, int(store.get(f"{key}/port/{token}")), is_master=False)
        _own.set(asks[rank - 1], token)
    os.environ |= {"MASTER_PORT": str(_own.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _wait(until: float, who: str, what: str) -> None:
    if time.monotonic() > until:
        raise UsageError(f"{who} waited {PATIENCE:.0f} s in vain for {what}")
    time.sleep(0.05)


def _by_file(name: str) -> str:
    """Agree through a file that belongs to this job step of SLURM."""
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
