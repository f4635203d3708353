"""The n-th call to the file system fails, for the first and last n of each site; with VITLAB_NTH=1 for every n."""

import os
import subprocess

import pytest
from harness import Process
from nth import COMMANDS, loop, prepare

EVERY = int(os.environ.get("VITLAB_NTH", 0))
SHARE = float(os.environ.get("VITLAB_FAULTS_SHARE", 1))
OF_ENDS = float(os.environ.get("VITLAB_NTH_SHARE", SHARE))  # a random share of the first and last n
QUICK = ("validate", "pack", "results")  # of which `make faults-quick` fails a sample


@pytest.mark.faults
@pytest.mark.timeout(36000 if EVERY else 3600)
@pytest.mark.parametrize("command", COMMANDS if SHARE == 1 else QUICK)
def test_whichever_system_call_fails_the_command_prints_one_line_or_recovers(tmp_path, note, command):
    found = loop(tmp_path / "loop", command, OF_ENDS, EVERY)
    how = "each n" if EVERY else f"{'' if OF_ENDS >= 1 else 'a random share of '}the first and the last n of each site"
    how += ", each error" if EVERY == 4 else ""
    wrong = f"{len(found['wrong'])} wrong"
    typed = "fit --resume" if command == "resume" else command
    note(f"vitlab {typed}", wrong, "0", nth={**found, "how": how, "wrong": wrong, "lines": len(found["lines"])})
    assert not found["wrong"], "\n".join(found["wrong"])


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", ("fit", "test", "export") if SHARE == 1 else ("test",))
def test_from_whichever_system_call_on_all_fail_the_command_prints_one_line(tmp_path, note, command):
    found = loop(tmp_path / "loop", command, 0.2 * SHARE, forever=True)
    note(
        f"`vitlab {command}`, a disk that is gone from the n-th call on: {found['injected']} of the {found['calls']} n",
        f"{len(found['wrong'])} tracebacks, lines without a path, exits 0 without a result, or failed repetitions",
        "0",
    )
    assert not found["wrong"], "\n".join(found["wrong"])


WRITERS = {
    "export to safetensors": ["export", "done", "--to", "safetensors", "-o", "disk/a.safetensors"],
    "export to onnx": ["export", "done", "--to", "onnx", "-o", "disk/a.onnx"],
    "export to pt2": ["export", "done", "--to", "pt2", "-o", "disk/a.pt2"],
    "export to onnx-int8": ["export", "done", "--to", "onnx-int8", "-o", "disk/a.onnx"],
    "look": ["look", "done", "--pictures", "2", "-o", "disk/l.html"],
    "analyze": ["analyze", "cost", "done", "-o", "disk/analysis"],
    "pack": ["pack", "photos", "disk/packed", "--size", "16", "--num_workers", "0"],
}


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_full_disk_is_one_line_in_every_command_that_writes(tmp_path, note):
    disk = tmp_path / "disk"
    disk.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]
    if subprocess.run(line, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system takes privileges")
    try:
        prepare(tmp_path)
        (disk / "fill").write_bytes(bytes(60 * 1024))
        wrong = []
        writers = WRITERS if SHARE == 1 else {name: WRITERS[name] for name in ("export to onnx", "look", "pack")}
        for name, words in writers.items():
            process = Process(words, tmp_path)
            code, said = process.wait(120), process.output()
            names_it = words[-1] in said or "disk/" in said or "disk has" in said  # pack refuses before it writes
            if code not in (1, 2) or said.count("\n") != 1 or not names_it:
                wrong.append(f"{name}: exit {code}: {said[-300:]}")
        note(
            f"a full disk in {', '.join(writers)}", f"{len(wrong)} without exit 1 or 2 and one line with the path", "0"
        )
        assert not wrong, "\n".join(wrong)
    finally:
        subprocess.run(["umount", disk], check=False)
