"""Some tokens of each image go through the network, as if the others had not been there."""

import pytest
import torch

from vitlab.models import VisionTransformer

SIZE = {
    "img_size": (8, 12),
    "in_chans": 1,
    "patch_size": 4,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "dropout": 0.0,
}
POSITIONS = [
    *({"pos_embed": name} for name in ("none", "learned", "factorized", "sincos1d", "sincos2d", "fourier")),
    *({"pos_embed": name, "pos_embed_join": "every_layer"} for name in ("learned", "relpos", "rope_mixed")),
    *({"pos_embed": name} for name in ("alibi2d", "cpb", "rope2d", "liere", "string", "fire", "relpos1d")),
    {"pos_embed": ["learned", "rope2d", "relpos"]},
    {"pos_embed": "learned", "tokenizer": "t2t", "t2t_kernels": [3, 3], "t2t_dim": 8},
    {"pos_embed": "relpos", "class_token": False, "global_pool": "avg", "reg_tokens": 2, "grad_checkpoint": True},
]


def net_of(arguments):
    torch.manual_seed(0)
    net = VisionTransformer(**SIZE | arguments).double().eval()
    for p in net.pos_embed.parameters():  # so that positions tell
        torch.nn.init.normal_(p, std=0.5)
    return net


def one_by_one(net, image, keep):
    """Slow and obvious: each hook of all tokens, of which the rows of the kept ones are taken."""
    rows = torch.cat([torch.arange(net.num_prefix_tokens), keep + net.num_prefix_tokens])
    full = net.embed(image)  # whose tokens have their positions
    pos, x = net.pos_embed, full[:, rows]

    def whole(part):  # tokens of all places, zeros where none is kept
        filled = part.new_zeros(*part.shape[:-2], full.shape[1], part.shape[-1])
        filled[..., rows, :] = part
        return filled

    for i, block in enumerate(net.blocks):
        x = pos.enter(whole(x), i)[:, rows]
        y, attn = block.norm1(x), block.attn
        q, k, v = attn.qkv(y).view(1, len(rows), 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (pos.rotate(whole(part), i)[..., rows, :] for part in (q, k))
        logits = q @ k.mT * attn.qk_scale
        if (bias := pos.bias(i)) is not None:
            logits = logits + bias[:, rows][:, :, rows]
        if (related := pos.relate(whole(q * attn.qk_scale), whole(k), i)) is not None:
            logits = logits + related[:, :, rows][..., rows]
        x = x + attn.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    return net.norm(x)


@pytest.mark.parametrize("arguments", POSITIONS, ids=str)
def test_kept_tokens_keep_their_places_with_every_kind_of_position_embedding(arguments):
    net, images = net_of(arguments), torch.randn(3, 1, 8, 12, dtype=torch.float64)
    n = net.grid_size[0] * net.grid_size[1]
    keep = torch.stack([torch.randperm(n)[:4] for _ in images])
    found = net.forward_features(images, keep=keep)
    wanted = torch.cat([one_by_one(net, images[i : i + 1], keep[i]) for i in range(3)])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)  # tables of angles are float32
    plain, everything = net.forward_features(images), torch.arange(n).expand(3, -1)
    torch.testing.assert_close(net.forward_features(images, keep=everything), plain, atol=1e-12, rtol=1e-12)
    parameters = [p for p in net.parameters() if p.requires_grad]
    weights = torch.randn_like(found)
    slow, fast = (
        torch.autograd.grad((x * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
        for x in (wanted, found)
    )
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    assert net.pos_embed.order is None


def test_a_method_that_cannot_keep_some_tokens_says_so():
    images, keep = torch.zeros(2, 1, 8, 12), torch.zeros(2, 3, dtype=torch.long)
    for arguments, given, line in (
        ({"pos_embed": "conv"}, keep, "ConvPosEmbed has a `leave`, which may mix neighboring tokens"),
        ({"pos_embed": ["learned", "conv"]}, keep, "ConvPosEmbed has a `leave`, which may mix neighboring tokens"),
        ({"drop_path_rate": 0.5, "drop_path_subset": True}, keep, "`drop_path_subset` drops images"),
        ({}, keep[:1], "`keep` must be"),
        ({}, keep.float(), "`keep` must be"),
        ({}, keep[:, :0], "`keep` must be"),
    ):
        with pytest.raises(ValueError, match=line):
            VisionTransformer(**SIZE | arguments).forward_features(images, keep=given)
