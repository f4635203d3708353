"""Compile a network part by part: one graph for all blocks, and gradients that leave while others are computed."""

from typing import Literal

from torch import nn

from vitlab.layers.block import Block

CompileMode = Literal["default", "reduce-overhead", "max-autotune"]


def compile_parts(net: nn.Module, mode: CompileMode | bool = "default", backend: str = "inductor") -> None:
    """Let torch compile every block of a network, and its tokenizer, at their first call.

    Blocks share their code: the first two are compiled and the others take what is there, so that a network of twelve
    is ready several times sooner than as one graph, and sizes and modes that come later cost as little. Each block's
    gradients are ready when its own backward pass ends, so that DDP sends them while earlier blocks are computed.
    Positions, prefix tokens and the head stay as they are.

    Args:
        net: A network, or what holds some.
        mode: As in :func:`torch.compile`; True is ``default``, False leaves all as it is.
        backend: As in :func:`torch.compile`.

    Example:
        >>> from vitlab.layers.pos_embed import PosEmbed
        >>> block = Block(16, num_heads=2)
        >>> compile_parts(block, backend="eager")
        >>> block(torch.randn(3, 5, 16), PosEmbed(), layer=0).shape
        torch.Size([3, 5, 16])
    """
    if not mode:
        return
    from torch import _dynamo

    _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, 64)  # of all blocks, sizes and modes together
    for name, part in net.named_modules():
        if isinstance(part, Block) or name.rpartition(".")[2] == "tokenizer":
            part.compile(mode="default" if mode is True else mode, backend=backend)
