"""Position embeddings of one's own."""

import torch
from torch import Tensor, nn

from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.resample import Grid
from vitlab.models import VisionTransformer

SIZE = {"img_size": (8, 12), "in_chans": 1, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
TRANSPOSED, LARGER = (12, 8), (12, 16)


class Waves(PosEmbed):
    """Vectors by the number of a token."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.arange(x.shape[1])[:, None] * torch.arange(1, 1 + x.shape[2])).sin()


class Enters(PosEmbed):
    """The same before each block, for prefix tokens too."""

    def enter(self, x: Tensor, layer: int) -> Tensor:
        return x + (torch.arange(x.shape[1])[:, None] * torch.arange(layer, layer + x.shape[2])).sin()


class Turns(PosEmbed):
    """A rotation of all tokens by their number."""

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] * 0.5
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Near(PosEmbed):
    """A bias by the difference of numbers, for all tokens."""

    def bias(self, layer: int) -> Tensor:
        n = torch.arange(1.0 + self.grid_size[0] * self.grid_size[1])
        return -(n[:, None] - n).square()[None] * (1 + layer)


class ByKey(PosEmbed):
    """A bias by the number of a key, one row for all queries."""

    def bias(self, layer: int) -> Tensor:
        return torch.arange(1.0 + self.grid_size[0] * self.grid_size[1]).cos()[None, None] * (1 + layer)


class ForAllHeads(Near):
    """The bias of two tokens, without the axis of heads."""

    def bias(self, layer: int) -> Tensor:
        return super().bias(layer)[0]


class ByKeyAlone(PosEmbed):
    """A bias by keys and their numbers, one row for all queries."""

    def relate(self, q: Tensor, k: Tensor, layer: int) -> Tensor:
        return k[..., :1].mT.tanh() * torch.arange(k.shape[2]).cos()


class ByQuery(PosEmbed):
    """A bias by queries, with the signature that vitlab had first."""

    def relate(self, q: Tensor, layer: int) -> Tensor:
        return q.mean(dim=-1, keepdim=True) * torch.arange(q.shape[2])


class ByBoth(PosEmbed):
    """A bias by queries, keys and numbers of both."""

    def relate(self, q: Tensor, k: Tensor, layer: int) -> Tensor:
        n = torch.arange(k.shape[2])
        return (q[..., :1] * k[..., :1].mT).tanh() * (n[:, None] - 2 * n).cos()


OWN = [Waves, Enters, Turns, Near, ByKey, ForAllHeads, ByKeyAlone, ByQuery, ByBoth, [Turns, Near]]


class Vectors(AddedPosEmbed):
    """A table of vectors, frozen where it is built, in a part of the module."""

    def __init__(self, grid_size: Grid, embed_dim: int, scale: float = 1.0, depth: int = 1) -> None:
        super().__init__(grid_size)
        self.factor, self.depth = scale, depth
        self.vectors = nn.Embedding(grid_size[0] * grid_size[1], embed_dim).requires_grad_(False)

    def table(self, layer: int = 0) -> Tensor:
        return self.factor * self.vectors(torch.arange(self.grid_size[0] * self.grid_size[1]))


class Fixed(AddedPosEmbed):
    """A table that nothing trains."""

    def table(self, layer: int = 0) -> Tensor:
        return torch.ones(self.grid_size[0] * self.grid_size[1], 16)


class OneRow(AddedPosEmbed):
    """A number of rows of one's own."""

    policies = ()

    def __init__(self, grid_size: Grid, embed_dim: int, *rows: int, join: str = "stem") -> None:
        super().__init__(grid_size, join)
        self.shape = (*(rows or [1]), embed_dim)

    def table(self, layer: int = 0) -> Tensor:
        return torch.ones(self.shape)


def net_of(pos_embed: object) -> VisionTransformer:
    torch.manual_seed(0)
    methods = [spec(cls) for cls in pos_embed] if type(pos_embed) is list else pos_embed
    return VisionTransformer(**SIZE, init_std=0.3, pos_embed=methods).double().eval()


def spec(cls: type[PosEmbed], **args: object) -> dict[str, object]:
    return {"class_path": f"{cls.__module__}.{cls.__name__}", "init_args": args}
