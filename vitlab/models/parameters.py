"""What an optimizer needs from a network: its parameters from input to output, and which must not decay."""

from typing import Any

from torch import nn


def stages(net: Any) -> list[list[nn.Parameter]]:
    """Return the parameters by stage, from input to output: embedding with all positions, each block, head.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> len(VisionTransformer(img_size=32, embed_dim=48, depth=4, num_heads=3).stages())
        6
    """
    prefix = [token for token in (net.cls_token, net.reg_token) if token is not None]
    pool = [] if net.attn_pool is None else list(net.attn_pool.parameters())
    embedding = [*net.tokenizer.parameters(), *prefix, *net.pos_embed.parameters(), *net.norm_pre.parameters()]
    head = [*net.norm.parameters(), *pool, *net.fc_norm.parameters(), *net.head.parameters()]
    return [embedding, *(list(block.parameters()) for block in net.blocks), head]


def no_weight_decay(net: Any) -> set[str]:
    """Return the names of the parameters that must not decay, in the form that timm's optimizers expect.

    Only weights of linear and convolution layers decay: not biases, norms, class and register tokens, scales, or any
    parameter of the position embedding.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, embed_dim=48, depth=1, num_heads=3)
        >>> "cls_token" in net.no_weight_decay(), "blocks.0.mlp.fc1.weight" in net.no_weight_decay()
        (True, False)
    """
    decays = {id(m.weight) for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    decays -= {id(p) for p in net.pos_embed.parameters()}
    return {name for name, p in net.named_parameters() if id(p) not in decays}
