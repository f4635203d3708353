import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import TINY, finish
from report import commit


@pytest.fixture
def note(request):
    """Keep a figure for the table of `make faults`, where VITLAB_FAULTS names a folder for them."""

    def keep(fault, found, must, **more):
        folder = os.environ.get("VITLAB_FAULTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            row = {"fault": fault, "found": found, "must": must, "commit": commit(), **more}
            (Path(folder) / f"{request.node.name}.json").write_text(json.dumps(row))

    return keep


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished tiny run."""
    folder = tmp_path_factory.mktemp("finished")
    finish([*TINY, "--trainer.max_epochs=2", "--data.subset=0.2", "--name", "done"], folder)
    return folder / "runs" / "done"
