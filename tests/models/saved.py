"""Networks whose weights tests save and load."""

import torch

from vitlab.models.vit import VisionTransformer

TINY = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "num_classes": 5,
}
UNSAID = "positions: the file does not say its grid, taken to be 4 x 4"
T2T = TINY | {"tokenizer": "t2t", "t2t_kernels": (3, 3, 3), "t2t_strides": (2, 2, 1), "t2t_dim": 4}
T2T |= {"pos_embed": "sincos1d", "qkv_bias": False, "norm_eps": 1e-5}


def tiny(**arguments):
    return VisionTransformer(**TINY | arguments)


def official(model, extra_rows=1):
    """The state dict of ``model`` as the official T2T-ViT would have it, class position 0."""
    table = torch.cat([torch.zeros(extra_rows, 16), model.pos_embed.table()])[None]
    state = {name.replace("tokenizer.", "tokens_to_token."): value for name, value in model.state_dict().items()}
    return state | {"pos_embed": table}


def assert_same_outputs(one, two):
    images = torch.randn(2, 3, *one.img_size)
    with torch.no_grad():
        torch.testing.assert_close(one.eval()(images), two.eval()(images), rtol=1e-5, atol=1e-5)
