"""Processes that belong together."""

import pytest

from vitlab.runs.launch import is_launched


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
