"""Processes that belong together."""

import pytest
from torch import distributed

from vitlab.runs.launch import first_to_say, is_launched, meeting_place


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"WORLD_SIZE": "1"}, False),
        ({"WORLD_SIZE": "2"}, True),
        ({"SLURM_NTASKS": "4"}, False),  # a shell in an allocation, outside srun
        ({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, True),
    ],
)
def test_torchrun_srun_and_lightning_launch(environment, expected, monkeypatch):
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_launched() == expected


def test_of_several_processes_the_first_says_a_mistake():
    assert first_to_say("wrong") and first_to_say("wrong")  # a single process has nobody to ask
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        assert first_to_say("wrong") and not first_to_say("wrong") and first_to_say("something else")
    finally:
        distributed.destroy_process_group()


def test_the_line_about_missing_processes_names_their_meeting_address(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert meeting_place() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert meeting_place() == "first:29500"
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setenv("SLURM_NODELIST", "node[3-4]")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert meeting_place() == "node3:19711"
