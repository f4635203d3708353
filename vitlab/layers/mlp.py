"""The MLP of a block, which acts on each token separately, and its activations."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vitlab.class_paths import ClassSpec, build_choice, word_of
from vitlab.layers.custom import build_custom
from vitlab.layers.linear import Linear
from vitlab.layers.recompute import recomputed
from vitlab.ranges import check_word

ActName = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
ActChoice = ActName | str | ClassSpec
MlpName = Literal["mlp", "swiglu", "ghost"]
MlpChoice = MlpName | str | ClassSpec


def build_act(act_layer: ActChoice, dim: int) -> nn.Module:
    """Build the activation of ``dim`` channels: ``act_layer`` is a name, a class of torch.nn or a class path.

    ``gelu`` is the exact function of Hendrycks and Gimpel 2016 (arXiv:1606.08415), ``gelu_tanh`` and
    CLIP's ``quick_gelu``, x sigmoid(1.702 x), are approximations.

    Example:
        >>> build_act("relu", 2)(torch.tensor([-1.0, 2.0])), build_act("Tanh", 2)
        (tensor([0., 2.]), Tanh())
    """
    match word_of("act_layer", act_layer, get_args(ActName)):
        case "gelu":
            return nn.GELU()
        case "gelu_tanh":
            return nn.GELU(approximate="tanh")
        case "quick_gelu":
            return QuickGELU()
        case "relu":
            return nn.ReLU()
        case "silu":
            return nn.SiLU()
    return build_custom("act_layer", act_layer, dim, get_args(ActName), {})


class QuickGELU(nn.Module):
    """The approximation of GELU by Hendrycks and Gimpel 2016 (arXiv:1606.08415) that CLIP uses.

    Example:
        >>> QuickGELU()(torch.tensor(1.0))
        tensor(0.8458)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map any shape to itself."""
        return x * torch.sigmoid(1.702 * x)


class Mlp(nn.Module):
    """Two linear layers with an activation between them, applied to each token.

    With ``swiglu`` the first layer is twice as wide: one half, activated, gates the other. With silu this is SwiGLU,
    Shazeer 2020 (arXiv:2002.05202). With ``ghost`` the first layer computes ``dim`` channels, and the rest are scaled
    and activated copies: the cheap maps of Han et al. 2020 (arXiv:1911.11907), as in T2T-ViT-Ghost.

    Args:
        dim: Token width D.
        hidden_dim: Width between the two layers; ``None`` is ``dim``.
        act_layer: The activation.
        dropout: Share of values that training sets to zero after each layer, 0 to 1.
        mlp_layer: The variant: mlp, swiglu or ghost.

    Example:
        >>> Mlp(8, hidden_dim=32)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        act_layer: ActChoice = "gelu",
        dropout: float = 0.0,
        mlp_layer: MlpName = "mlp",
    ) -> None:
        super().__init__()
        hidden_dim = dim if hidden_dim is None else hidden_dim
        _check(mlp_layer, dim, hidden_dim)
        self.gated = mlp_layer == "swiglu"
        ghost = mlp_layer == "ghost"
        self.fc1 = Linear(dim, dim if ghost else hidden_dim * (1 + self.gated))
        self.cheap = nn.Parameter(torch.empty(hidden_dim // dim - 1, dim).uniform_(-1, 1)) if ghost else None
        self.act = build_act(act_layer, hidden_dim)
        self.fc2 = Linear(hidden_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., D)`` to ``(..., D)``."""
        x = self.fc1(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            return self.dropout(self.fc2(self.dropout(self.act(gate) * x)))
        if self.cheap is None:
            return self.dropout(recomputed(self.act, x, lambda x: self.fc2(self.dropout(x))))
        x = self.act(x)
        x = torch.cat([x, self.act(x[..., None, :] * self.cheap).flatten(-2)], dim=-1)
        return self.dropout(self.fc2(self.dropout(x)))


MLPS: Mapping[MlpName, Callable[..., Mlp]] = {
    "mlp": Mlp,
    "swiglu": partial(Mlp, mlp_layer="swiglu"),
    "ghost": partial(Mlp, mlp_layer="ghost"),
}


def build_mlp(mlp_layer: MlpChoice, dim: int, hidden_dim: int, act_layer: ActChoice, dropout: float) -> nn.Module:
    """Build the MLP of a block: by a word, or a module of a class path that maps ``(B, L, D)`` to itself.

    A class receives ``dim``, ``hidden_dim``, ``act_layer`` and ``dropout`` if its constructor has them.

    Example:
        >>> build_mlp("swiglu", 8, hidden_dim=32, act_layer="silu", dropout=0.0)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """
    offered = {"dim": dim, "hidden_dim": hidden_dim, "act_layer": act_layer, "dropout": dropout}
    module: nn.Module = build_choice("mlp_layer", mlp_layer, MLPS, nn.Module, offered)
    return module


def _check(mlp_layer: str, dim: int, hidden_dim: int) -> None:
    check_word("mlp_layer", mlp_layer, get_args(MlpName))
    if hidden_dim < 1:
        raise ValueError(f"`mlp_ratio` must give the MLP at least one channel, got {hidden_dim} of {dim}")
    if mlp_layer == "ghost" and (hidden_dim % dim or hidden_dim < 2 * dim):
        raise ValueError(
            f"`mlp_ratio` must be a whole number of at least 2 for mlp_layer='ghost', got {hidden_dim / dim:g}"
        )
