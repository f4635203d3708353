"""Processes that belong together."""

import pytest
from torch import distributed

from vitlab.runs.launch import first_to_say, is_launched


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
