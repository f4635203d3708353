import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_itemcollected(item):
    """An epoch of a set of twelve tensors is shorter than the interval of logging, and Lightning says so."""
    item.add_marker(pytest.mark.filterwarnings("ignore:The number of training batches"))
