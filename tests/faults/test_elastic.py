"""Three processes of which one is killed a minute: torchrun starts them again, TorchFT's others go on."""

import os

import pytest
from elastic import torchft, torchrun

QUICK = float(os.environ.get("VITLAB_FAULTS_SHARE", 1)) < 1
STEPS, SECONDS, KILLS = (60, 3, 1) if QUICK else (1200, 60, 10)


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_torchrun_loses_at_most_one_step_a_kill(tmp_path, note, monkeypatch, python):
    monkeypatch.setenv("VITLAB_PAUSE", "0.1" if QUICK else "0.5")
    found = torchrun(tmp_path / "run", STEPS, SECONDS, KILLS, python)
    note(
        f"torchrun --max_restarts, three processes, --checkpoint.every_n_steps=1: {found['kills']} SIGKILLs, one each "
        f"{SECONDS} s",
        f"steps lost a kill: {found['steps lost a kill']}, {len(found['different'])} differences from the undisturbed",
        "at most 1 each, 0",
    )
    assert found["code"] == 0 and found["kills"] and max(found["steps lost a kill"]) <= 1
    assert not found["different"]


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_torchft_continues_without_the_killed_process(tmp_path, note):
    pytest.importorskip("torchft")
    found = torchft(tmp_path / "run", STEPS, SECONDS, KILLS)
    note(
        f"TorchFT in a loop of its own, three processes: {found['kills']} SIGKILLs, one each {SECONDS} s",
        f"{found['steps with two values']} steps with two values, {found['attempts given up']} attempts given up",
        "0",
    )
    assert found["steps"] == STEPS and found["steps with two values"] == 0
