import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Keep what is found out about images to each test, in a folder that no data set reads."""
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / ".cache"))
