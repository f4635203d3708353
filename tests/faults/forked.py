"""A stand-in for ``python`` whose processes start in a moment: a server has imported everything and forks for each.

A script takes the place of the interpreter; it hands its words, environment and files to the server, passes signals
on, and ends as the fork ends. The forks of one launch, known by ``VITLAB_LAUNCH``, are listed in a folder, so that a
kill hits the process that works.
"""

import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
facts = dict(os.environ, VITLAB_CLIENT=str(os.getpid()))
words = json.dumps([sys.argv[1:], facts, os.getcwd()]).encode()
socket.send_fds(server, [len(words).to_bytes(4, "big")], [0, 1, 2])
server.sendall(words)
for number in (1, 2, 10, 12, 15):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
server.settimeout(0.5)
parent, answer = os.getppid(), None
while answer is None:
    try:
        answer = server.recv(4)
    except TimeoutError:
        if parent and os.getppid() != parent:
            server.send(bytes(1))
            parent = 0
code = int.from_bytes(answer, "big", signed=True) if answer else -9
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Python:
    """The server and the script, for as long as the block.

    ``path`` is the script.
    """

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="python"))
        self.path = self.folder / "python"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.folder / "socket"))
        self.listener.listen(64)
        self.path.write_text(CLIENT.format(python=sys.executable, address=str(self.folder / "socket")))
        self.path.chmod(0o755)
        words = [sys.executable, __file__, str(self.listener.fileno()), str(self.folder)]
        self.process = subprocess.Popen(words, pass_fds=[self.listener.fileno()])
        line, facts = [self.path, "-m", "vitlab", "--version"], os.environ | {"VITLAB_PYTHON": str(self.path)}
        subprocess.run(line, env=facts, check=True, capture_output=True)  # it has imported everything
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self.listener.close()

    def alive(self, launch):
        """Return the living forks of a launch, with the module that each runs."""
        found = {}
        for path in (self.folder / launch).glob("*"):
            with suppress(OSError):
                if (Path("/proc") / path.name / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                    found[int(path.name)] = path.read_text()
        return found


def serve(listener, folder):
    """Fork for each that connects, for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        head, fds, _, _ = socket.recv_fds(connection, 4, 3)
        words = b""
        while head and len(words) < int.from_bytes(head, "big"):
            words += connection.recv(1 << 20)
        if head and not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            os.setsid()
            look_after(connection, fds, *json.loads(words), folder)
            os._exit(0)
        for each in (*fds, connection.fileno()):
            os.close(each)
        connection.detach()


def look_after(connection, fds, words, environment, place, folder):
    """Start the fork below a process that can end before it, as the script's parent may; pass on what comes."""
    told, tell = os.pipe()
    if not (parent := os.fork()):
        if not (pid := os.fork()):
            for each in (told, tell, connection.fileno()):
                os.close(each)
            listed = folder / environment.get("VITLAB_LAUNCH", "none") / str(os.getpid())
            listed.parent.mkdir(exist_ok=True)
            listed.write_text(" ".join(words[:3]))
            become(fds, words, environment, place)
        os.write(tell, pid.to_bytes(4, "big"))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(tell, code.to_bytes(4, "big", signed=True))
        os._exit(0)
    for each in (tell, *fds):
        os.close(each)
    pid = int.from_bytes(os.read(told, 4), "big")
    with suppress(ProcessLookupError):
        ended = os.pidfd_open(pid)
    while True:
        ready = select.select([connection, told if parent else ended], [], [])[0]
        if told in ready:
            with suppress(OSError):
                connection.send(os.read(told, 4))
            return
        if ended in ready:
            return
        for number in connection.recv(1) if connection in ready else ():
            with suppress(ProcessLookupError):
                os.kill(*((pid, number) if number else (parent, signal.SIGKILL)))
            parent = parent if number else None
            break
        else:
            if connection in ready:  # the script was killed
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return


def become(fds, words, environment, place):
    """Run what the words of ``python`` say, as a fresh process would."""
    os.setpgid(0, 0)
    for i, each in enumerate(fds):
        os.dup2(each, i)
        os.close(each)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(place)
    random.seed()
    sys.modules["numpy.random"].seed()
    sys.executable = environment["VITLAB_PYTHON"]
    words = [word for word in words if word != "-u"]
    if words[0] == "-m" and words[1] != "vitlab":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        os._exit(0)
    if hook := environment.get("VITLAB_BEFORE"):
        module, _, function = hook.partition(":")
        getattr(importlib.import_module(module), function)()
    main = importlib.import_module("vitlab.__main__")
    sys.argv = [main.__file__, *words[1 + (words[0] == "-m") :]]
    main.run()


def main(fd, folder):
    """Import, and serve."""
    importlib.import_module("imported")
    serve(socket.socket(fileno=int(fd)), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
