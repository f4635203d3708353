import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from forked import Python
from harness import TINY, finish
from report import commit


def figure(item):
    """Return the file of a test's figure, which VITLAB_FAULTS names a folder for, and its content."""
    path = Path(os.environ.get("VITLAB_FAULTS", "nowhere")) / f"{item.name}.json"
    return path, json.loads(path.read_text()) if path.is_file() else {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out tests that have passed at this very commit: `make faults` goes on where it was cut off."""
    for item in items:
        if "python" in item.fixturenames:  # in one process of `make faults-quick`, which starts one server
            item.add_marker(pytest.mark.xdist_group("python"))
    rows = [(item, figure(item)[1]) for item in items if "VITLAB_FAULTS" in os.environ]
    if done := [item for item, row in rows if row and row.get("passed") == commit() and not commit().endswith("+")]:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Add to a figure that its test has passed."""
    report = yield
    path, row = figure(item)
    if row and report.passed and call.when == "call":
        path.write_text(json.dumps({**row, "passed": row["commit"]}))
    return report


@pytest.fixture
def note(request):
    """Keep a figure for the table of `make faults`, where VITLAB_FAULTS names a folder for them."""

    def keep(fault, found, must, **more):
        if "VITLAB_FAULTS" in os.environ:
            path, _ = figure(request.node)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"fault": fault, "found": found, "must": must, "commit": commit(), **more}))

    return keep


@pytest.fixture(scope="session")
def python():
    """A stand-in for ``python`` whose processes have imported everything; each import anew takes seconds."""
    with Python() as server:
        yield server


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished tiny run."""
    folder = tmp_path_factory.mktemp("finished")
    finish([*TINY, "--trainer.max_epochs=2", "--data.subset=0.2", "--name", "done"], folder)
    return folder / "runs" / "done"
