"""A fork server: a process that has imported everything forks for each command, as imports dominate small cells.

A child is like a fresh process: it has its own session, environment, directory, output and random numbers, and no
threads or devices of the parent. It ends with its command, so nothing accumulates over cells.
"""

import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

IDLE = 60.0  # seconds without a child after which it ends
MOST = 1 << 17  # bytes of a request
ROOMS = ("cli.fit", "cli.evaluate", "cli.analyze", "api", "config.parser", "jobs.train.fit", "jobs.evaluate")
OTHERS = ("numpy.random", "pandas", "pyarrow.parquet", "torchvision.transforms.v2", "torchmetrics.classification")


class Child:
    """A command in a forked process, with the interface of :class:`subprocess.Popen`."""

    def __init__(self, pid: int, reply: socket.socket) -> None:
        self.pid, self.reply = pid, reply

    def wait(self, timeout: float) -> int:
        """Return the exit code; -9 if the server is gone, which ends the child too."""
        if not select.select([self.reply], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("vitlab", timeout)
        answer = self.reply.recv(64)
        self.reply.close()
        if not answer:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return int(answer or -signal.SIGKILL)


class Server:
    """The process that forks.

    Args:
        env: Its environment; variables that libraries read when loaded, such as OMP_NUM_THREADS, apply to its children.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.served = False
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-m", "vitlab.ablation.execution.warm", str(theirs.fileno())]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": self.errors}
        fds = (theirs.fileno(),)
        self.process = subprocess.Popen(words, env=dict(env), pass_fds=fds, start_new_session=True, **pipes)
        theirs.close()

    def has_ended(self) -> bool:
        """Return whether it ended after serving a command; a server that never worked does not count."""
        if not self.served or self.process.poll() is None:
            return False
        self.close()
        return True

    def close(self) -> None:
        """End the server."""
        self.socket.close()
        self.errors.close()

    def why(self) -> str:
        """Return why it ended: its last line of output, or its exit code."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"exit code {self.process.returncode}")

    def start(self, args: Sequence[str], env: Mapping[str, str], log: int, locks: Sequence[int]) -> Child:
        """Fork for ``vitlab ARGS``.

        Raises:
            OSError: The process is gone.
        """
        request = json.dumps({"args": list(args), "env": dict(env), "cwd": os.getcwd()}).encode()
        reply, theirs = socket.socketpair()
        with theirs, ExitStack() as closing:
            closing.enter_context(reply)
            fds = [theirs.fileno(), log, *locks]
            socket.send_fds(self.socket, [request], fds)
            theirs.close()
            if len(pid := reply.recv(8)) < 8:
                raise BrokenPipeError("it is gone")
            closing.pop_all()
        self.served = True
        return Child(int.from_bytes(pid, "big"), reply)


def main(fd: int) -> None:
    """Import, then serve; in a child, run its command."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a time limit's warning, which is for the commands
    for name in (*(f"vitlab.{room}" for room in ROOMS), *OTHERS):
        importlib.import_module(name)
    _parse()
    gc.collect()
    gc.freeze()  # the children's collector leaves these pages alone, so that they stay shared
    if task := _serve(socket.socket(fileno=fd)):
        _command(*task)


def _parse() -> None:
    """Parse a configuration, and build nothing: the parsers of all classes stay."""
    from vitlab.config.parser import VitlabCLI
    from vitlab.shipped import find_file

    class Parsed(VitlabCLI):
        """One that ends where classes would be built and random numbers drawn."""

        def _set_seed(self) -> None:
            pass

        def instantiate_classes(self) -> None:
            """Build nothing."""

    Parsed(["--config", str(find_file("vit", "ablate"))])


def _serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request until nobody asks any more; return the request in each child, None in the end."""
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno())
    replies: dict[int, socket.socket] = {}
    with woken, wake:
        while True:
            ready = select.select([requests, woken], [], [], None if replies else IDLE)[0]
            if woken in ready:
                woken.recv(4096)
                _reap(replies)
            if requests in ready:
                request, fds, _, _ = socket.recv_fds(requests, MOST, 4)
                if not request or _holds_cuda():  # whoever asked is gone, or a fork would be of no use to it
                    for other in fds:
                        os.close(other)
                    return None
                if not (pid := _fork((requests, *replies.values()))):
                    os.close(fds.pop(0))
                    return json.loads(request), fds
                replies[pid] = socket.socket(fileno=fds.pop(0))
                with suppress(OSError):
                    replies[pid].send(pid.to_bytes(8, "big"))
                for other in fds:
                    os.close(other)
            if not ready and not replies:
                return None


def _holds_cuda() -> bool:
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.stderr.write("CUDA is in use in the process that forks\n")
        return True
    return False


def _fork(sockets: Sequence[socket.socket]) -> int:
    """Fork; return when the child has a session of its own and can be ended, and 0 in it, with the sockets closed."""
    told, tell = os.pipe()
    if not (pid := os.fork()):
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        for open_ in sockets:
            open_.close()
        os.close(told)
    os.close(tell)
    if pid:
        os.read(told, 1)
        os.close(told)
    return pid


def _reap(replies: dict[int, socket.socket]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with replies.pop(ended[0]) as reply, suppress(OSError):
                reply.send(str(os.waitstatus_to_exitcode(ended[1])).encode())


def _command(request: dict[str, Any], fds: list[int]) -> None:
    """Run ``vitlab`` as a fresh process would, and end."""
    run = importlib.import_module("vitlab.__main__").run  # as in a process of the same words
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(fds[0], stream)
    os.close(fds[0])  # what may follow are locks, which live as long as this process
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    random.seed()
    sys.modules["numpy.random"].seed()
    sys.argv = [str(Path(__file__).parents[2] / "__main__.py"), *request["args"]]
    run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
