def pytest_itemcollected(item):
    """Leave whole command lines, each parsed and mostly run, to `make test`: a second or more each."""
    item.add_marker("slow")
