"""Compute the last block for the class token alone where that cannot change the outputs.

At least half of its work would go into tokens that nobody reads.
"""

from typing import Any

from torch import Tensor, nn

from vitlab.layers.attention import Attention
from vitlab.layers.block import Block, LayerScale
from vitlab.layers.channels import Ghost
from vitlab.layers.dense_block import DenseBlock
from vitlab.layers.drop_path import DropPath
from vitlab.layers.kernels import KERNELS
from vitlab.layers.linear import LINEAR
from vitlab.layers.mlp import Mlp, QuickGELU
from vitlab.layers.plain import all_are_hooked, calls_plainly, has_plain_tensors, is_sharded
from vitlab.layers.pos_embed import PosEmbed

ELEMENTWISE = {
    nn.GELU,
    nn.SiLU,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Mish,
}
ELEMENTWISE |= {nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, QuickGELU}
PER_TOKEN: set[type[nn.Module]] = {Block, DenseBlock, Attention, Ghost, Mlp, LayerScale, DropPath, *ELEMENTWISE}
PER_TOKEN |= {*LINEAR, nn.Identity, nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.Sequential}
PER_QUERY = ("rotate", "bias", "relate", "leave")


def first_token(net: Any, images: Tensor) -> Tensor:
    """Return the first of the tokens of ``net.forward_features(images)``, ``(B, 1, D)``, where it is enough.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=2, num_heads=3)
        >>> first_token(net, torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 1, 48])
    """
    pos_embed, last = net.positions(images), len(net.blocks) - 1
    x = net.embed(images, pos_embed)
    for i in range(last):
        x = net.run_block(i, x, pos_embed)
    token: Tensor = net.norm(net.run_block(last, x, pos_embed, first_only=True))
    return token


def class_token_is_enough(net: Any) -> bool:
    """Return whether the last block may compute the class token alone, where the head reads nothing else.

    The outputs are the same to rounding: each layer after the keys and values acts on one token at a time, the class
    token is not rotated, and each module is called as vitlab wrote it. A subclass, a wrapper, a hook or a position
    embedding of one's own could tell the difference. Here alone this is decided; :class:`Attention` and :class:`Block`
    trust it.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
        >>> class_token_is_enough(net)
        True
        >>> hook = net.blocks[-1].register_forward_hook(lambda block, args, y: 2 * y)
        >>> class_token_is_enough(net)
        False
    """
    if all_are_hooked() or _is_overridden(net):
        return False
    block, pos_embed, last = net.blocks[-1], net.pos_embed, len(net.blocks) - 1
    after = [*block.modules(), *net.norm.modules()]
    return (
        calls_plainly(block, {Block, DenseBlock})
        and calls_plainly(block.attn, {Attention})
        and block.attn.kernel in KERNELS
        and all(calls_plainly(module, PER_TOKEN) for module in after)
        and _splits(net, block, block.attn.qkv)
        and all(map(_leaves_class_token, pos_embed.single_methods().values()))
        and not pos_embed.acts_after(last)
    )


def _is_overridden(net: Any) -> bool:
    """Return whether a subclass of the network, or a method put into it, may read other tokens."""
    own = type(net).__module__ == "vitlab.models.vit" or is_sharded(net)
    return not own or any(name in vars(net) for name in ("pool", "run_block", "forward_head", "forward_features"))


def _splits(net: Any, block: nn.Module, qkv: nn.Module) -> bool:
    """Return whether the weight of ``qkv`` can be split: that of FSDP2 is whole only where its block gathers it."""
    if is_sharded(qkv):
        return False
    return has_plain_tensors(qkv) or any(map(is_sharded, (net, block, block.get_submodule("attn"))))


def _leaves_class_token(method: PosEmbed) -> bool:
    """Return whether queries of the class token are not rotated, and can be treated without those of the patches."""
    changes = [name for name in PER_QUERY if getattr(type(method), name) is not getattr(PosEmbed, name)]
    ours = type(method).__module__.startswith("vitlab.layers.pos_embed.")
    return (ours or not changes) and not any(name in vars(method) for name in PER_QUERY)
