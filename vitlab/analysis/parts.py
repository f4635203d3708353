"""What analyses and training ask of a network: what its head reads, and its table of positions with their cosines."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.models.foreign import AnyNetwork
from vitlab.models.walk import Asked


def reads_token(net: Asked) -> bool:
    """Return whether the head reads the class token, and not the patches.

    Example:
        >>> from vitlab.models.vit import VisionTransformer
        >>> reads_token(VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2))
        True
    """
    return net.reads == "token" if isinstance(net, AnyNetwork) else net.global_pool == "token"


def read_out(net: Asked, total: Tensor, images: Tensor) -> Tensor:
    """Map ``(B, ..., L, L)`` to the ``(B, ..., N)`` row of what the head reads of ``(B, C, H, W)`` images.

    It is that of the class token, or the mean of the patches' rows, weighted by the pool's attention if there is one.
    """
    prefix = net.num_prefix_tokens
    if reads_token(net):
        return total[..., 0, prefix:]
    rows, weights = total[..., prefix:, prefix:], pool_weights(net, images)
    return rows.mean(dim=-2) if weights is None else torch.einsum("bn, b...nm -> b...m", weights.to(rows), rows)


@torch.no_grad()
def pool_weights(net: Asked, images: Tensor) -> Tensor | None:
    """Return the pool's attention to the patches, mean over its heads, ``(B, N)``; None if it is not by attention.

    Example:
        >>> from vitlab.models.vit import VisionTransformer
        >>> net = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, global_pool="map")
        >>> pool_weights(net, torch.randn(2, 3, 8, 8)).sum(dim=1).allclose(torch.ones(2))
        True
    """
    if isinstance(net, AnyNetwork) or net.global_pool != "map":
        return None
    pool: Any = net.attn_pool
    patches = net.forward_features(images)[:, net.num_prefix_tokens :]
    q = pool.q(pool.latent).unflatten(2, (pool.num_heads, -1)).transpose(1, 2)  # (1, A, 1, d)
    k = pool.kv(patches).chunk(2, dim=2)[0].unflatten(2, (pool.num_heads, -1)).transpose(1, 2)  # (B, A, N, d)
    weights: Tensor = (q @ k.transpose(2, 3) * k.shape[3] ** -0.5).softmax(dim=3).mean(dim=1)[:, 0]
    return weights


def positions_added(pos_embed: PosEmbed) -> AddedPosEmbed | None:
    """Return the part of a position embedding that adds a table of vectors to tokens; None if there is none.

    Example:
        >>> from vitlab.models.vit import VisionTransformer
        >>> net = VisionTransformer(embed_dim=48, depth=1, num_heads=3, pos_embed=["learned", "rope2d"])
        >>> type(positions_added(net.pos_embed)).__name__
        'Learned'
    """
    return next((each for each in pos_embed.single_methods().values() if isinstance(each, AddedPosEmbed)), None)


def similarity(table: Tensor) -> Tensor:
    """Map ``(N, D)`` positions to their cosine similarities ``(N, N)``, as in figure 7 of ViT (arXiv:2010.11929).

    Example:
        >>> similarity(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        tensor([[1., 0.],
                [0., 1.]])
    """
    table = F.normalize(table, dim=-1)
    return table @ table.T
