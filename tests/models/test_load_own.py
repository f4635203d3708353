"""Weights of modules and tasks of one's own."""

import lightning as L
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.models.saved import TINY, tiny
from tests.networks import randomized
from vitlab.api import _weights_of
from vitlab.errors import UsageError
from vitlab.interface import has_grid
from vitlab.jobs.checkpoint import load_checkpoint, save_weights
from vitlab.jobs.train.initial import load_initial
from vitlab.layers import PosEmbed
from vitlab.models.load import load_weights
from vitlab.tasks import Classifier


class Own(L.LightningModule):
    """A module that knows nothing of vitlab."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)


class Late(Own):
    """A module that has its head once Lightning has called its ``setup``."""

    def setup(self, stage):
        self.head = nn.Linear(2, 2)


def test_a_module_of_ones_own_starts_with_all_weights_as_they_are(tmp_path):
    source = Own()
    torch.save({"state_dict": source.state_dict()}, tmp_path / "last.ckpt")
    torch.save(source.state_dict(), tmp_path / "plain.pt")
    save_file(source.net.state_dict(), tmp_path / "net.safetensors")
    for name in ("last.ckpt", "plain.pt", "net.safetensors"):
        assert load_initial(own := Own(), None, tmp_path / name) == []
        assert torch.equal(own.net.weight, source.net.weight)
    torch.save({"weight": source.net.weight}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"other\.pt does not fit the network .*Missing key"):
        load_initial(Own(), None, tmp_path / "other.pt")


def test_weights_of_a_network_that_setup_builds_are_refused_by_the_reason(path):
    (late := Late()).setup("fit")
    torch.save({"state_dict": late.state_dict()}, path)
    with pytest.raises(
        UsageError, match=r"Late has no head.weight before its `setup`.* in `__init__` or `configure_model`$"
    ):
        load_checkpoint(Late(), path)


class Beside(L.LightningModule):
    """A module whose outputs are of a network of vitlab and of a layer beside it."""

    def __init__(self):
        super().__init__()
        self.net = randomized(tiny(num_classes=0))
        self.last = nn.Linear(16, 3)

    def forward(self, images):
        return self.last(self.net(images))


class Compiling(L.LightningModule):
    """Compiles its network."""

    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class Compiled(Compiling, Beside):
    """The same, compiled."""


class Built(Beside):
    """Its last layer is built by Lightning's hook for that."""

    def __init__(self):
        super().__init__()
        self.last = None

    def configure_model(self):
        self.last = self.last or nn.Linear(16, 3)


class Frozen(Beside):
    """Its checkpoints leave out what is not trained, a constant."""

    strict_loading = False

    def __init__(self):
        super().__init__()
        self.given = nn.Parameter(torch.ones(3), requires_grad=False)


@pytest.mark.parametrize("cls", [Beside, pytest.param(Compiled, marks=pytest.mark.slow), Built, Frozen])
def test_a_module_of_ones_own_gets_the_weights_beside_its_network_too(path, cls):
    (saved := cls()).configure_model()
    state = {name: value for name, value in saved.state_dict().items() if name != "given"}
    torch.save({"state_dict": state}, path)
    save_weights(path, weights := path.with_suffix(".safetensors"), saved)
    images = torch.randn(2, 3, 16, 16)
    for file in (path, weights):
        load_checkpoint(loaded := cls(), file)
        assert loaded(images).equal(saved(images))
        (started := cls()).configure_model()
        assert "weights: those outside the network, too, last.bias, last.weight" in load_initial(started, None, file)
        assert started(images).equal(saved(images))
    save_file(saved.net.state_dict(), weights)
    with pytest.raises(UsageError, match=r"would give the network alone, and \w+ is measured with .*take a checkpoint"):
        load_checkpoint(saved, weights)


class BuiltNet(L.LightningModule):
    """Its whole network is built by Lightning's hook for that."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        self.net = self.net or nn.Linear(3, 2)


class CompiledNet(Compiling, Own):
    """Its network is compiled."""


class Counting(Own):
    """Keeps what is no tensor in its state dict."""

    def get_extra_state(self):
        return {"count": 3}

    def set_extra_state(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("cls", [BuiltNet, CompiledNet, Counting])
def test_weights_that_are_kept_alone_are_read_again(path, cls):
    (saved := cls()).configure_model()
    torch.save({"state_dict": saved.state_dict()}, path)
    save_weights(path, weights := path.with_suffix(".safetensors"), saved)
    for file in (path, weights):
        load_checkpoint(loaded := cls(), file)
        assert loaded.net(torch.ones(1, 3)).equal(saved.net(torch.ones(1, 3)))
    given = _weights_of(saved)  # as an object, to `vitlab.fit`
    assert given.keys() == saved.state_dict().keys() and given.get("_extra_state", {"count": 3}) == {"count": 3}


class Scaling(PosEmbed):
    """Keeps a number of its own beside tensors, as a part in eight bits does."""

    scale = 1.0

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]

    def forward(self, x):
        return x * self.scale


def test_what_a_part_keeps_beside_tensors_is_read_by_all_that_read_weights(path):
    (saved := Classifier(**TINY, in_chans=3, pos_embed=f"{__name__}.Scaling")).net.pos_embed.scale = 3.0
    torch.save({"state_dict": saved.state_dict()}, path)
    save_weights(path, weights := path.with_suffix(".safetensors"), saved)
    images = torch.randn(2, 3, 16, 16)
    loaded = Classifier(**TINY, in_chans=3, pos_embed=f"{__name__}.Scaling")
    load_checkpoint(loaded, path)
    assert loaded(images).equal(saved(images))
    larger = Classifier(**TINY | {"img_size": 24, "num_classes": 2}, in_chans=3, pos_embed=f"{__name__}.Scaling")
    load_weights(larger.net, weights, "usual", grid=(4, 4))  # which has tensors alone
    assert larger.net.pos_embed.scale == 1.0
    load_weights(larger.net, path, "usual", grid=(4, 4))
    assert larger.net.pos_embed.scale == 3.0
    gray = Classifier(**TINY, in_chans=1, pos_embed=f"{__name__}.Scaling")
    with pytest.raises(ValueError, match="its images have 3 channels, and 1 here"):
        load_weights(gray.net, path, grid=(4, 4))


class Listing(Scaling):
    """Keeps bytes as a tensor, of any length, as parts in eight bits of other libraries do."""

    def get_extra_state(self):
        return torch.zeros(int(self.scale))

    def set_extra_state(self, state):
        self.scale = float(len(state))


def test_what_a_part_keeps_in_a_tensor_of_any_length_is_read(path):
    (saved := Classifier(**TINY, in_chans=3, pos_embed=f"{__name__}.Listing")).net.pos_embed.scale = 3.0
    torch.save(saved.net.state_dict(), path)
    loaded = Classifier(**TINY, in_chans=3, pos_embed=f"{__name__}.Listing")
    load_weights(loaded.net, path, grid=(4, 4))
    assert loaded.net.pos_embed.scale == 3.0


class Projected(Classifier):
    """A task of vitlab with a layer that only `embed` uses."""

    def __init__(self, **task):
        super().__init__(**task)
        self.project = nn.Linear(16, 4)

    def embed(self, images):
        return self.project(self.net.forward_features(images)[:, 0])


def test_what_a_subclass_of_a_task_adds_is_loaded_too(path):
    saved, loaded = (Projected(**TINY, in_chans=3) for _ in range(2))
    torch.save({"state_dict": saved.state_dict()}, path)
    save_weights(path, weights := path.with_suffix(".safetensors"), saved)
    for file in (path, weights):
        nn.init.zeros_(loaded.project.weight)
        load_checkpoint(loaded, file)
        assert loaded.project.weight.equal(saved.project.weight)


def test_a_network_of_ones_own_with_a_grid_size_is_none_of_vitlab():
    (task := L.LightningModule()).net = nn.Linear(3, 2)
    task.net.grid_size = (4, 4)
    assert not has_grid(task)
