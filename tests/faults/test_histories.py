"""Never two in one directory: many short histories of trainers, each with faults of its own."""

import os

import pytest
from histories import histories

COUNT = int(os.environ.get("VITLAB_HISTORIES", 500 if os.environ.get("VITLAB_FAULTS_SHARE", "1") == "1" else 5))


@pytest.mark.faults
@pytest.mark.timeout(7200)
def test_in_no_history_do_two_processes_train_in_one_directory(tmp_path, note):
    done, attempts, faults, wrong = 0, 0, 0, []
    for first in range(0, COUNT, 10):  # a figure for those that have ended, if this one is cut off
        found = histories(tmp_path / str(first), range(first, min(first + 10, COUNT)), at_once=5)
        done, attempts, faults = done + found["histories"], attempts + found["attempts"], faults + found["faults"]
        wrong += found["wrong"]
        note(
            f"{done} histories of trainers that want one directory: lock and records removed, processes "
            f"stopped past the deadline and killed, clocks that jump, no flock, failing utime; {attempts:,} "
            f"attempts to train, {faults:,} faults",
            f"{len(wrong)} contradictions: a step with two values, a row or file of one taken over, two alive",
            "0",
        )
    assert attempts > COUNT
    assert not wrong, "\n".join(wrong)
