"""Never two in one directory: many short histories of trainers, each with faults of its own."""

import os

import pytest
from histories import histories

COUNT = int(os.environ.get("VITLAB_HISTORIES", 500 if os.environ.get("VITLAB_FAULTS_SHARE", "1") == "1" else 20))


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_in_no_history_do_two_train_in_one_directory(tmp_path, note):
    found = histories(tmp_path, range(COUNT))
    note(
        f"{found['histories']} histories of trainers that want one directory: lock and records removed, processes "
        f"stopped past the deadline and killed, clocks that jump, no flock, failing utime; {found['attempts']} "
        f"attempts to train, {found['faults']} faults",
        f"{len(found['wrong'])} contradictions: a step with two values, a row or file of one taken over, two alive",
        "0",
    )
    assert found["attempts"] > found["histories"]
    assert not found["wrong"], "\n".join(found["wrong"])
