"""Hooks of position embeddings of one's own that return another precision or another shape than the tokens have."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.jobs.train.facts import _macs_of_parts
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.resample import Grid
from vitlab.models import VisionTransformer
from vitlab.models.load import load_weights

SIZE = {"img_size": 8, "in_chans": 1, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}


class Sines(AddedPosEmbed):
    policies = ()

    def __init__(self, grid_size: Grid, embed_dim: int) -> None:
        super().__init__(grid_size)
        places, channels = np.arange(grid_size[0] * grid_size[1])[:, None], np.arange(embed_dim)
        self.register_buffer("sines", torch.from_numpy(np.sin(places / 100 ** (channels / embed_dim))))

    def table(self, layer: int = 0) -> Tensor:
        return self.sines


class SinesAtOnce(Sines):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.asarray(self.sines.cpu().double())).to(x.device)


class Turns(PosEmbed):
    def rotate(self, x: Tensor, layer: int) -> Tensor:
        return x * torch.from_numpy(np.linspace(1, 2, x.shape[2])).to(x.device)[:, None]


class Relates(PosEmbed):
    def relate(self, q: Tensor, k: Tensor, layer: int) -> Tensor:
        return torch.from_numpy(np.eye(q.shape[2], k.shape[2]))[None, None].to(q.device)


@pytest.mark.parametrize("kind", [Sines, SinesAtOnce, Turns, Relates])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_float64_of_numpy_gets_the_precision_of_the_tokens(kind: type[PosEmbed], precision: str) -> None:
    images = torch.randn(2, 1, 8, 8)
    net = VisionTransformer(**SIZE, pos_embed={"class_path": f"{__name__}.{kind.__name__}"}).eval()
    exact = net.double()(images.double())
    dtype = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision)
    net.to(dtype or torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        found = net(images.to(dtype or torch.float32))
    assert found.dtype == dtype or dtype is None
    tolerance = {"64-true": 0.0, "32-true": 1e-5}.get(precision, 0.05)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=tolerance)
    tokens = torch.zeros(1, 16, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert kind not in (Sines, SinesAtOnce) or net.float().pos_embed(tokens).dtype == torch.float32


class ForPatches(PosEmbed):
    """Made for N patches, where all tokens are meant."""

    def __init__(self, grid_size: Grid, hook: str) -> None:
        super().__init__(grid_size)
        self.hook, self.patches = hook, grid_size[0] * grid_size[1]

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        return x * torch.ones(self.patches, 1, device=x.device) if self.hook == "rotate" else x

    def bias(self, layer: int) -> Tensor | None:
        return torch.zeros(2, self.patches, self.patches) if self.hook == "bias" else None

    def relate(self, q: Tensor, k: Tensor, layer: int) -> Tensor | None:
        return torch.zeros(1, 2, self.patches, self.patches) if self.hook == "relate" else None


ANSWERS = {
    "bias": r"^`bias` of ForPatches must return \(A, L, L\), here \(2, 17, 17\): 1 prefix token \+ 16 patches; got",
    "relate": r"`relate` of ForPatches must return \(B, A, L, L\), here \(1, 2, 17, 17\): 1 prefix token",
    "rotate": r"own_hooks.py, line \d+, `return x .*: RuntimeError: .*; here L = 17: 1 prefix token \+ 16",
}


@pytest.mark.parametrize("hook", ANSWERS)
def test_a_hook_for_patches_where_tokens_are_meant_is_told_how_many_there_are(hook: str) -> None:
    spec = {"class_path": f"{__name__}.ForPatches", "init_args": {"hook": hook}}
    with pytest.raises(UsageError, match=ANSWERS[hook]):
        _macs_of_parts(VisionTransformer(**SIZE, pos_embed=spec))
    _macs_of_parts(VisionTransformer(**SIZE, pos_embed=spec, class_token=False, global_pool="avg"))  # L is N there


class AllRows(PosEmbed):
    splits_queries = True

    def bias(self, layer: int) -> Tensor:
        return torch.zeros(2, 17, 17)


def test_a_class_that_says_that_it_gives_some_rows_and_gives_all_is_refused() -> None:
    net = VisionTransformer(**SIZE, pos_embed={"class_path": f"{__name__}.AllRows"})
    assert net(torch.zeros(1, 1, 8, 8)).shape == (1, 3)
    q, k = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 17, 8)
    with pytest.raises(UsageError, match=r"must return the rows of `self.queries` alone, here 4; got \(2, 17, 17\)"):
        net.blocks[0].attn.position_bias(q, k, net.pos_embed.of_queries(slice(4, 8)), 0)


class OfParts(PosEmbed):
    """Calls its layers by a name that vitlab's list of positions has, too."""

    def __init__(self, grid_size: Grid, embed_dim: int) -> None:
        super().__init__(grid_size)
        self.parts = torch.nn.ModuleList([torch.nn.Linear(embed_dim, embed_dim)])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts[0](x)


class OfPartsMisshapen(OfParts):
    def bias(self, layer: int) -> Tensor:
        return torch.zeros(3)


def test_a_class_may_call_its_layers_parts(tmp_path: Path) -> None:
    net = VisionTransformer(**SIZE, pos_embed={"class_path": f"{__name__}.OfParts"}).eval()
    images = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(net(images), net.forward_head(net.forward_features(images)))
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    again = VisionTransformer(**SIZE, pos_embed={"class_path": f"{__name__}.OfParts"}).eval()
    load_weights(again, tmp_path / "net.safetensors")
    torch.testing.assert_close(again(images), net(images))
    with pytest.raises(UsageError, match=r"`bias` of OfPartsMisshapen must return \(A, L, L\)"):
        VisionTransformer(**SIZE, pos_embed={"class_path": f"{__name__}.OfPartsMisshapen"})(images)
