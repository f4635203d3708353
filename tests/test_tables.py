"""Tables that a command writes and shows."""

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from vitlab import tables
from vitlab.errors import escaped


def test_csv_holds_no_formula(tmp_path):
    cells = ["=1+1.png", "+a", "-a", "@a", "\ta", "a=1", "1-2"]
    table = pd.DataFrame({"path": cells, "class_1": cells[::-1], "value": np.linspace(-1, 1, 7, dtype="float32")})
    tables.write(table, tmp_path / "out.csv")
    read = pd.read_csv(tmp_path / "out.csv")
    assert list(read["path"]) == ["'=1+1.png", "'+a", "'-a", "'@a", "'\ta", "a=1", "1-2"]
    assert list(read["class_1"]) == list(read["path"])[::-1]
    assert read["value"][0] == -1  # numbers are no text
    tables.write(table, tmp_path / "out.json")
    assert [row["path"] for row in json.loads((tmp_path / "out.json").read_text())] == cells


def test_small_numbers_keep_their_digits(tmp_path):
    values = [1.23456e-5, -3e-14, 0.5, float("nan")]
    table = pd.DataFrame({"path": [*"abcd"], "value": pd.Series(values, dtype="float32")})
    tables.write(table, tmp_path / "out.json")
    kept = [row["value"] for row in json.loads((tmp_path / "out.json").read_text())]
    assert kept == [*map(float, np.array(values[:3], dtype="float32")), None]
    assert [line.split()[1] for line in tables.as_text(table).splitlines()[1:]] == [
        "1.235e-05",
        "-3e-14",
        "0.5000",
        "nan",
    ]
    assert tables.metrics_text({"mae": 2.5e-5, "loss": 0.98333}) == "mae 2.5e-05, loss 0.9833"


def test_an_output_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.csv"
    path.write_text("earlier")

    class Full(pd.DataFrame):
        def to_csv(self, file, **_):
            Path(file).write_text("half")
            raise OSError("no space left on device")

        def assign(self, **_):
            return self

    with pytest.raises(OSError, match="no space"):
        tables.write(Full({"path": ["a"]}), path)
    assert path.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["out.csv"]


def test_a_file_name_that_is_not_text_can_be_written_and_printed():
    assert escaped(os.fsdecode(b"caf\xe9.png")) == r"caf\xe9.png"
    assert escaped("café.png") == "café.png"
    table = pd.DataFrame({"path": ["\x1b[2Ja\n.png"], "class_1": ["b"], "probability_1": [0.5]})
    mark = "\N{REPLACEMENT CHARACTER}"
    assert tables.as_text(table).splitlines()[1].startswith(f"{mark}[2Ja{mark}.png  b")
