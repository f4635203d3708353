"""What ``vitlab bench`` measures: speed, memory and numerics of networks, loaders and training steps."""

import os
import sys
from pathlib import Path


def process_of(module: str) -> tuple[list[str], dict[str, str]]:
    """Return words and environment of a Python process of its own that runs ``bench.MODULE``."""
    places = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    path = os.pathsep.join(place for place in places if place)
    return [sys.executable, "-m", f"bench.{module}"], {**os.environ, "PYTHONPATH": path}
