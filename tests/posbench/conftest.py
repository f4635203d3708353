"""Cells of a few methods, and photos."""

import numpy as np
import pytest
from PIL import Image

from tests.posbench.planted import HERE, tiny
from vitlab.position_bench.answers import answers_of
from vitlab.position_bench.cells import Bench
from vitlab.position_bench.running import CellRunner


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    data, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name, count in (("train", 60), ("test", 20)):
        for i, pixels in enumerate(rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)):
            (data / name / str(i % 10)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(data / name / str(i % 10) / f"{i:02}.png")
    bench = Bench(tmp_path_factory.mktemp("cells"), data, tiny(), say=lambda line: None)
    for method in ("none", "learned", {"class_path": f"{HERE}.Square"}):
        CellRunner(bench, method).run()
    CellRunner(bench, {"class_path": f"{HERE}.Alias"}, "alias").run()
    return bench


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are not set for print and not drawn, which is most of the time of a page."""
    monkeypatch.setattr("vitlab.position_bench.page.printed", lambda figure, width: figure)
    monkeypatch.setattr("vitlab.position_bench.page.figure_bytes", lambda figure, form: b"<svg/>")


@pytest.fixture
def answers(small):
    return {k: v for t in small.protocol["trainings"] for k, v in answers_of(t, small.pictures.of(t).test).items()}


@pytest.fixture
def photos_of_three_classes(tmp_path):
    """Flat photos, of another shade in each class, of several sizes."""
    for split, count in (("train", 8), ("val", 4)):
        for k, name in enumerate(("a", "b", "c")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                side = (40 + 4 * i, 50 - 3 * i)
                Image.new("RGB", side, (80 * k, 80 * k + i, 10)).save(tmp_path / split / name / f"{i}.png")
    return tmp_path
