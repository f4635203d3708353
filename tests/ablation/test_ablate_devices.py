"""Which device a child gets: by the environment alone."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack

import pytest

from vitlab.ablation.execution import gpus, process
from vitlab.ablation.execution.gpus import Slot, one_name, slot, visible_devices
from vitlab.ablation.execution.process import child_environment
from vitlab.ablation.lab import Lab


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A slot that is taken is asked for again at once."""
    monkeypatch.setattr(gpus, "WAIT", 0.01)


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("4,5", ["4", "5"]),
        ("2, 3,", ["2", "3"]),
        (" GPU-8f3a ,, MIG-77c1/0/1,", ["GPU-8f3a", "MIG-77c1/0/1"]),
        ("3,3", ["3"]),
        ("1,-1,0", ["1"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_slots_are_the_visible_devices_and_a_host_has_each_only_once(monkeypatch, tmp_path, visible, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert visible_devices() == devices
    with ExitStack() as held:
        slots = [held.enter_context(slot(1, 2)) for _ in range(2 * len(devices) or 3)]
        assert [s.device for s in slots] == (devices * 2 or [None] * 3)
        if not devices:
            assert child_environment(Slot(workers=2)).get("CUDA_VISIBLE_DEVICES") == visible
            return
        asked = iter([False, True])
        with slot(1, 2, lambda: next(asked)) as none:  # as another process would: it waits
            assert none is None
        held.pop_all().close()
    with slot(1, 2) as again:
        assert again.device == devices[0]
        heir = subprocess.Popen(["sleep", "30"], pass_fds=[again.fd])  # of a `run` that is killed
    with slot(1, 1, lambda: True) as none, slot(1, 2) as second:
        assert none is None and second.device == (devices[1:] or devices)[0]
    heir.kill()
    heir.wait()


@pytest.mark.parametrize(("asked", "threads"), [(None, "4"), ("1", "1"), ("16", "4"), ("0", "4"), ("2,1", "4")])
def test_a_child_has_its_share_of_the_cores_and_no_more_threads_than_its_user_asked_for(monkeypatch, asked, threads):
    monkeypatch.setattr(process, "core_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert child_environment(Slot(workers=2))["OMP_NUM_THREADS"] == threads


def test_a_gpu_is_shared_in_parts_of_any_size_or_taken_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f3a")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def room(shares):
        with ExitStack() as held:
            taken = [held.enter_context(slot(1, shares, iter([False, True]).__next__)) for _ in range(shares + 1)]
        return sum(place is not None for place in taken)

    assert [room(shares) for shares in (1, 2, 3, 7, 13)] == [1, 2, 3, 7, 13]
    with slot(1, 2) as half:  # as one `run` has it
        assert half.device == "GPU-8f3a" and [room(shares) for shares in (1, 2, 3, 4)] == [0, 1, 1, 2]
    with slot(1, 1):
        assert [room(shares) for shares in (1, 2, 3)] == [0, 0, 0]
    monkeypatch.setattr(gpus, "_listed", dict)  # nothing tells the UUIDs
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the one GPU of each job, by another's number
    names = [monkeypatch.setenv("SLURM_JOB_ID", job) or one_name("0") for job in ("71", "72")]
    assert names == ["71.0", "72.0"]


def test_a_gpu_has_a_slot_for_each_worker_or_as_many_as_asked_for(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [gpus.shares_per_gpu(*asked) for asked in ((1, 1), (2, 1), (3, 1), (15, 1), (2, 4))] == [1, 1, 2, 8, 4]


@pytest.mark.slow
def test_probes_share_a_gpu_as_cells_do(lab, monkeypatch):
    monkeypatch.chdir(lab.path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    lab.change(command=[sys.executable, "together.py"], workers=3)
    (lab.path / "together.py").write_text(
        "import os, pathlib, runpy, time\n"
        "pathlib.Path(str(os.getpid())).with_suffix('.here').touch()\n"
        "end = time.time() + 60\n"
        "while len(list(pathlib.Path().glob('*.here'))) < 3 and time.time() < end: time.sleep(0.05)\n"
        "assert time.time() < end, 'the other probes wait'\n"
        f"runpy.run_path({str(lab.toy)!r}, run_name='__main__')\n"
    )
    Lab("toy.yaml", trust_command=True).plan()
    assert len(list(lab.path.glob("*.here"))) == 3


def test_a_gpu_is_recognized_by_number_uuid_or_prefix_of_a_uuid(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-8932f937-d72c)'\necho 'GPU 1: NVIDIA H100 (UUID: GPU-77aa)'\n"
        "echo '  MIG 1g.10gb Device 0: (UUID: MIG-c7384736)'\necho '  MIG 2g.20gb Device 1: (UUID: MIG-99/2/0)'\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gpus._listed.cache_clear()
    try:
        assert visible_devices() == ["0", "MIG-c7384736", "MIG-99/2/0"]  # a GPU that is cut is its parts
        assert [one_name(n) for n in ("0", "GPU-8932", "MIG-c7384736")] == ["GPU-8932f937-d72c"] * 2 + ["MIG-c7384736"]
        with slot(1, 1) as first:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932")
            with slot(1, 1, iter([False, True]).__next__) as none:
                assert first.device == "0" and none is None
    finally:
        gpus._listed.cache_clear()


@pytest.mark.slow
def test_each_running_probe_has_a_device_of_its_own(lab, monkeypatch):
    monkeypatch.chdir(lab.path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,")
    lab.change(command=[sys.executable, "devices.py"])
    (lab.path / "devices.py").write_text(
        "import json, os, runpy, sys, time\n"
        "began = time.time(); time.sleep(0.5)\n"
        "row = json.dumps([os.environ['CUDA_VISIBLE_DEVICES'], began, time.time()])\n"
        "open('devices', 'a').write(row + chr(10))\n"
        f"runpy.run_path({str(lab.toy)!r}, run_name='__main__')\n"
    )
    Lab("toy.yaml", trust_command=True).plan()
    rows = sorted(map(json.loads, (lab.path / "devices").read_text().splitlines()), key=lambda row: row[1])
    assert len(rows) == 3 and {row[0] for row in rows} == {"4", "5"}
    for first in rows:
        for second in rows:
            assert first is second or first[0] != second[0] or first[2] <= second[1] or second[2] <= first[1]
