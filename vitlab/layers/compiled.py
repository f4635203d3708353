"""Compile a network block by block: fast to start, and DDP can send the gradients of a block early."""

import re
from typing import Literal

import torch
from torch import nn

from vitlab.layers.block import Block

CompileMode = Literal["default", "reduce-overhead", "max-autotune"]


def compile_parts(net: nn.Module, mode: CompileMode | bool = "default", backend: str = "inductor") -> None:
    """Compile every block of a network, and its tokenizer, when they are first called.

    Blocks share their code: torch compiles the first two and reuses the result for the others. A network of twelve
    blocks is ready several times sooner than as one graph, and later image sizes and modes compile as quickly. The
    gradients of a block are ready when its own backward pass ends, so DDP sends them while earlier blocks are computed.
    Position embedding, prefix tokens and head are not compiled. All modes but ``default`` record kernels on a GPU: a
    loop of your own then calls :func:`mark_batch` before each batch, as tasks do.

    Args:
        net: A network, or a module that contains networks.
        mode: As in :func:`torch.compile`; True is ``default``, False compiles nothing.
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

    _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, 64)  # shared by all blocks, sizes and modes
    for name, part in net.named_modules():
        if isinstance(part, Block) or re.search(r"(^|\.)(blocks\.\d+|tokenizer)$", name):
            part.compile(mode="default" if mode is True else mode, backend=backend)


def mark_batch(mode: CompileMode | bool, device: torch.device) -> None:
    """Tell torch that a batch begins, if kernels of a GPU are recorded.

    Without it torch takes each call of a compiled block for a new batch where no backward pass is due, as in
    validation, and overwrites what the block before has returned (pytorch issue 152887).

    Args:
        mode: As in :func:`compile_parts`.
        device: Where the network is.

    Example:
        >>> mark_batch("reduce-overhead", torch.device("cpu"))  # nothing is recorded there
    """
    if device.type == "cuda" and mode in ("reduce-overhead", "max-autotune"):
        torch.compiler.cudagraph_mark_step_begin()
