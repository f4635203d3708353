"""Files of weights that are damaged, hostile or none."""

import errno
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from tests.models.saved import tiny
from tests.networks import randomized
from vitlab.models.load import load_weights
from vitlab.models.weights_file import check_readable, read_weights


def test_a_damaged_json_beside_weights_is_reported(path):
    torch.save(randomized(tiny()).state_dict(), path)
    for text, reason in (
        ("[", "must hold a JSON object"),
        ('{"network": 3}', "`network` must hold arguments .*, got 3"),
    ):
        path.with_name(f"{path.name}.json").write_text(text)
        with pytest.raises(ValueError, match=reason):
            load_weights(tiny(), path)


class Trap:
    def __init__(self, flag):
        self.flag = flag

    def __reduce__(self):
        return os.mkdir, (str(self.flag),)


@pytest.mark.parametrize("legacy", [True, False])
def test_a_file_that_would_run_code_is_refused_and_does_not(path, tmp_path, legacy):
    flag = tmp_path / "it_ran"
    torch.save({"state_dict": Trap(flag)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ValueError, match="could run code") as error:
        load_weights(tiny(), path)
    assert not flag.exists()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_a_truncated_torch_file_is_refused_in_one_line(path, share, legacy):
    torch.save(tiny().state_dict(), path, _use_new_zipfile_serialization=not legacy)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match="truncated or not a file that torch wrote") as error:
        load_weights(tiny(), path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_a_file_that_cannot_be_opened_is_not_called_truncated(path, monkeypatch, number):
    """Before, the first raised ValueError: "is truncated or not a file that torch wrote"."""
    torch.save(tiny().state_dict(), path)
    real = open

    def refused(file, *words, **more):
        if str(file) == str(path):
            raise OSError(number, os.strerror(number), str(file))
        return real(file, *words, **more)

    monkeypatch.setattr("builtins.open", refused)
    for read in (check_readable, read_weights):
        with pytest.raises(OSError) as error:
            read(path)
        assert (error.value.errno, error.value.filename) == (number, str(path))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_a_truncated_safetensors_file_is_refused_in_one_line(tmp_path, share):
    path = tmp_path / "weights.safetensors"
    save_file(tiny().state_dict(), path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match="truncated or not a safetensors file") as error:
        load_weights(tiny(), path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"<html>not found</html>", b"\x80\x02garbage", b"PK\x03\x04 no zip", pickle.dumps({"a": 1}, 4)]
)
def test_another_kind_of_file_is_refused_in_one_line(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="truncated or not a file that torch wrote"):
        load_weights(tiny(), path)


@pytest.mark.parametrize(
    "content", [[1, 2], {"epoch": 3}, torch.zeros(3), {"state_dict": {"a": torch.ones(1), "b": 2}}, {0: torch.zeros(3)}]
)
def test_a_file_without_a_state_dict_is_refused(path, content):
    torch.save(content, path)
    with pytest.raises(ValueError, match="holds no state dict"):
        load_weights(tiny(), path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_weights(tiny(), tmp_path / "none.pth")
