import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items):
    """A set of twelve tensors needs no workers, and Lightning says so in every test."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*does not have many workers"))
            item.add_marker(pytest.mark.filterwarnings("ignore:The number of training batches"))
