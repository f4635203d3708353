import pytest

from vitlab.callbacks.record import RunRecord
from vitlab.runs.directory import RunDir


@pytest.fixture
def record(tmp_path):
    """A record of a run, which adds up what training steps leave in the task."""
    run = RunDir(tmp_path)
    run.write("run.json", {})
    run.write("model.json", {"flops": 1000})
    return RunRecord(run, lambda trainer, task: None)
