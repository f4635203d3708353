"""Which device a child gets: by the environment alone."""

import json
import sys

import pytest

from vitlab.ablation.lab import Lab
from vitlab.ablation.work.process import environment, gpu_count


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("4,5", ["4", "5"]),
        ("2, 3,", ["2", "3"]),
        ("GPU-8f3a, MIG-77c1/0/1", ["GPU-8f3a", "MIG-77c1/0/1"]),
        ("1,-1,0", ["1"]),
        ("", []),
        ("-1", []),
    ],
)
def test_slots_take_the_devices_that_are_visible_in_turn(monkeypatch, visible, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == len(devices)
    given = [environment(2, slot, gpu_count())["CUDA_VISIBLE_DEVICES"] for slot in range(4)]
    assert given == ([devices[slot % len(devices)] for slot in range(4)] if devices else [visible] * 4)


def test_probes_at_work_have_a_device_each(lab, monkeypatch):
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
