"""The page on what pre-training is worth is what its numbers say."""

import importlib.util
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pretraining", BENCHMARKS / "pretraining.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_the_kept_numbers(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "HERE", tmp_path)
    script.write(json.loads((BENCHMARKS / "pretraining.json").read_text()))
    assert (tmp_path / "pretraining.md").read_text() == (BENCHMARKS / "pretraining.md").read_text()


def test_tokens_beat_pixels_and_a_random_network_for_every_seed_as_the_docs_say(script):
    rows = json.loads((BENCHMARKS / "pretraining.json").read_text())
    values = {(row["features"], row["seed"]): row for row in rows}
    (pixels,) = (row["tokens"] for row in rows if row["features"] == "pixels")
    for seed in script.SEEDS:
        for name in script.CONFIGS:
            assert values[name, seed]["tokens"] > max(pixels, values["random network", seed]["tokens"])
            assert values["random network", seed]["mean"] < values[name, seed]["mean"] < pixels
