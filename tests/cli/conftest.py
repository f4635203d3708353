from pathlib import Path

import pytest


def pytest_itemcollected(item):
    """Leave whole command lines, each parsed and mostly run, to `make test`: a second or more each."""
    item.add_marker("slow")


@pytest.fixture
def userpkg(here, monkeypatch):
    """A folder to work in, where the package of a user is found."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
