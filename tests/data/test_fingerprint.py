"""The fingerprint of data of one's own, as data.json has it."""

import json

import numpy as np
import pytest
import torch

from vitlab.errors import UsageError
from vitlab.interface import fingerprint
from vitlab.jobs.train.facts import readable_fingerprint
from vitlab.runs.atomic import write_json
from vitlab.runs.records import read_record


class Data:
    class_names = ("cat", "dog")

    def __init__(self, **facts):
        self.facts = facts

    def fingerprint(self):
        return self.facts


def test_numbers_and_arrays_of_numpy_can_be_read_again(tmp_path):
    """They trained, and every later command called the run damaged."""
    numbers = {"counts": {np.int64(1): 2}, "share": np.float32(0.5), "one": np.bool_(True)}
    arrays = {"mean": np.array([0.5]), "std": torch.tensor([0.25])}
    given = Data(splits={"train": {"n": np.int64(64)}}, **numbers, **arrays)
    write_json(tmp_path / "data.json", found := fingerprint(given))
    assert read_record(tmp_path / "data.json") == json.loads(json.dumps(found))
    expected = {"splits": {"train": {"n": 64}}, "counts": {"1": 2}, "share": 0.5, "one": True}
    expected |= {"mean": [0.5], "std": [0.25], "class_names": ["cat", "dog"]}
    assert expected.items() <= found.items()


@pytest.mark.parametrize("of", [np.asarray, torch.tensor])
def test_large_arrays_that_differ_in_one_place_have_other_fingerprints(of):
    """Their text, in which the middle is left out, was the same."""
    labels, other = [[0] * 3000 for _ in range(2)]
    other[1500] = 1
    first, again, changed = (fingerprint(Data(labels=of(values)))["labels"] for values in (labels, labels, other))
    assert first == again != changed and first.startswith("int64 (3000,) sha256 ")


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"splits": "v2"}, r"must give `splits` as dict\[str, {n: int}\], or under another name: .*; got 'v2'"),
        ({"splits": {"train": {"hash": "c0"}}}, "must give `splits` as "),
        ({"notes": "text"}, r"must give `notes` as list\[str\]"),
        ({"img_size": 224}, r"must give `img_size` as list\[int\]"),
        ({"mean": 0.5}, r"must give `mean` as list\[float\]"),
        ({"targets": ["age"]}, "must give `targets` as dict"),
    ],
)
def test_what_cannot_be_read_again_is_refused_before_the_training(facts, told):
    with pytest.raises(UsageError, match=rf"^`fingerprint` of .*Data {told}"):
        readable_fingerprint(Data(**facts))
