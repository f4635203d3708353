"""A Slurm of one machine: munged, slurmctld and two slurmd on the loopback address, in a folder, stopped by their ids.

Nothing of the system's own Slurm is read, and nothing outside the folder is written.
"""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
NODES = ("a", "b")
CONFIG = """\
ClusterName=vitlab
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue}
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=15
MinJobAge=86400
ReturnToService=2
GresTypes=gpu
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=a NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} Gres=gpu:{cpus} State=UNKNOWN
NodeName=b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} Gres=gpu:{cpus} State=UNKNOWN
PartitionName=low Nodes=a,b Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=a,b MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """Return the programs of Slurm and munge that this machine lacks; they may lie in ``sbin``."""
    return [name for name in PROGRAMS if _program(name) is None]


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")


class Cluster:
    """Two nodes, ``a`` and ``b``, of ``cpus`` cores and generic GPUs each, which are empty files.

    Args:
        folder: Where configuration, state and logs of the daemons lie; its path must be short, as sockets lie there.
        cpus: Cores and GPUs that each node declares.
        requeue: Seconds that Slurm holds a requeued job, 120 by its default: the lifetime of a job's credential.
    """

    def __init__(self, folder: Path, cpus: int = 8, requeue: int = 15) -> None:
        self.folder, self.cpus = folder, cpus
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", *(f"spool/{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        for i in range(cpus):
            (folder / f"gpu{i}").touch()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        host = socket.gethostname().split(".")[0]
        fields = {"host": host, "user": getpass.getuser(), "ports": _free_ports(3), "requeue": requeue}
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, cpus=cpus, **fields))
        (folder / "gres.conf").write_text(f"NodeName=a,b Name=gpu File={folder}/gpu[0-{cpus - 1}]\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons and wait until both nodes are idle.

        Raises:
            TimeoutError: They are not within a minute; the logs in the folder say why.
        """
        own = {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munged.pid",
            "seed-file": "munge.seed",
            "log-file": "munged.log",
        }
        words = [f"--{option}={self.folder / name}" for option, name in own.items()]
        self._start("munged", "munged", "--foreground", *words)
        wait_for(lambda: (self.folder / "munge.socket").exists(), 30, f"munged to listen; see {self.folder}/munged.*")
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: self.states() == ["idle", "idle"], 60, f"both nodes to be idle; see {self.folder}/*.log")

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._start(node, "slurmd", "-D", "-N", node)

    def _start(self, name: str, program: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            command = [str(_program(program)), *words]
            self.daemons[name] = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)

    def stop(self) -> None:
        """End all jobs and daemons that this object has started, and nothing else."""
        self.ask("scancel", "--user", getpass.getuser())
        for node in NODES:
            for pid in self.processes(node):
                _signal(pid, signal.SIGCONT)
                _signal(pid, signal.SIGKILL)
        for daemon in reversed(self.daemons.values()):
            _signal(daemon.pid, signal.SIGCONT)
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *words: str) -> str:
        """Return what a command of Slurm prints on both streams."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def states(self) -> list[str]:
        """Return the state of each node, such as ``idle`` or ``down*``."""
        return self.ask("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split()

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm keeps of a job: JobState, Restarts, Reason, NodeList and so on."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", "-o", job)))

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING or COMPLETED."""
        return self.job(job).get("JobState", "UNKNOWN")

    def processes(self, node: str) -> list[int]:
        """Return the ids of a node's processes: those of its jobs first, then slurmstepd."""
        table = _parents()
        found: list[int] = []
        for pid, (_, command) in table.items():  # steps are no children of slurmd, but write to its log
            if command.startswith("slurmstepd") and f"{self.folder}/slurmd-{node}.log" in _open_files(pid):
                found += [*_below(pid, table), pid]
        return found

    def signal_node(self, node: str, number: int) -> None:
        """Send a signal to all processes of a node, slurmd last: SIGKILL is a crash, SIGSTOP a node that hangs."""
        for pid in [*self.processes(node), self.daemons[node].pid]:
            _signal(pid, number)


@contextmanager
def running_cluster(cpus: int = 8) -> Iterator[Cluster]:
    """Start a cluster in a new folder below /tmp, and stop and remove it at the end; logs of what failed stay."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o711)  # whoever asks munge for a credential must reach its socket
    cluster = Cluster(folder, cpus)
    try:
        cluster.start()
        yield cluster
    except BaseException:
        cluster.stop()
        raise
    cluster.stop()
    shutil.rmtree(folder)


def wait_for(happens: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait until something happens and return the seconds it took.

    Raises:
        TimeoutError: It does not within ``seconds``.
    """
    begun = time.monotonic()
    while not happens():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.5)
    return time.monotonic() - begun


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _parents() -> dict[int, tuple[int, str]]:
    """Return the parent and the command line of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                found[int(entry.name)] = parent, (entry / "cmdline").read_text().replace("\0", " ")
    return found


def _below(pid: int, table: dict[int, tuple[int, str]]) -> list[int]:
    children = [child for child, (parent, _) in table.items() if parent == pid]
    return [each for child in children for each in [*_below(child, table), child]]


def _open_files(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for entry in (Path("/proc") / str(pid) / "fd").iterdir():
            with suppress(OSError):
                found.append(str(entry.readlink()))
    return found


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
