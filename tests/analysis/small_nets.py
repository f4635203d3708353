from pathlib import Path
from typing import get_args

import torch

from vitlab.cli.main import main
from vitlab.layers.pos_embed import PosEmbedName
from vitlab.models.vit import VisionTransformer

POSITIONS = get_args(PosEmbedName)
SMALL = {"img_size": (8, 8), "in_chans": 1, "num_classes": 10, "patch_size": 2, "embed_dim": 16, "depth": 2}
SMALL |= {"num_heads": 2, "init_std": 0.2}


def small_net(**changes):
    """A network of random weights, those that start at zero included."""
    torch.manual_seed(0)
    net = VisionTransformer(**{**SMALL, **changes}).eval()
    for name, parameter in net.named_parameters():
        if parameter.ndim < 2 or name.startswith("pos_embed."):
            torch.nn.init.normal_(parameter, std=0.5)
    return net


def train(folder, *arguments):
    """A small run in ``folder``; of one epoch unless the arguments say otherwise."""
    config = Path(__file__).parents[2] / "configs" / "vit.yaml"
    few = ["--trainer.max_epochs=1", "--model.init_std=0.1", "--trainer.logger=false", "--quiet"]
    assert main(["fit", "--config", str(config), "--run_dir", str(folder), *few, *arguments]) == 0
    return folder


@torch.no_grad()
def brightness_net(img_size=8, patch_size=2, in_chans=1):
    """A network that says 1 where the mean of a monotone function of the patches' brightness is above 0, else 0."""
    net = VisionTransformer(
        img_size=img_size, in_chans=in_chans, num_classes=2, patch_size=patch_size, embed_dim=4, depth=1, num_heads=1,
        class_token=False, global_pool="avg", pos_embed="none",
    ).eval()  # fmt: skip
    for parameter in net.parameters():
        parameter.zero_()
    net.norm.weight.fill_(1)
    net.tokenizer.proj.weight[0], net.tokenizer.proj.weight[1] = 1 / patch_size**2, -1 / patch_size**2
    net.tokenizer.proj.bias[2], net.tokenizer.proj.bias[3] = 1, -1
    net.head.weight[:, 0] = torch.tensor([-1.0, 1.0])
    return net


@torch.no_grad()
def left_looking_net(**changes):
    """A network whose single head looks one patch to the left, whatever the image shows."""
    net = small_net(depth=1, num_heads=1, class_token=False, global_pool="avg", pos_embed="relpos", **changes)
    net.blocks[0].attn.qkv.weight[:32].zero_()
    net.blocks[0].attn.qkv.bias[:32].zero_()
    h, w = net.grid_size
    table = torch.zeros(1, 2 * h - 1, 2 * w - 1)
    table[0, h - 1, w - 2] = 50.0  # key minus query: no row, a column to the left
    net.pos_embed.bias_table.copy_(table.flip(1, 2).flatten(1).T[None])
    return net


@torch.no_grad()
def distracted_net(looked_at=3, decides=9, img_size=8):
    """A network whose heads 0 and 2 look at a patch of which they take nothing, and head 1 at the one that decides.

    The class token reads the brightness of patch ``decides``, and says 1 where it is above the mean, else 0.
    """
    patches = (img_size // 2) ** 2
    dim = 3 * (patches // 3 + 3)
    net = VisionTransformer(
        img_size=img_size, in_chans=1, num_classes=2, patch_size=2, embed_dim=dim, depth=1, num_heads=3
    ).eval()
    for parameter in net.parameters():
        parameter.zero_()
    first, second = patches, patches + 1  # channels of the content, after one for each position
    net.tokenizer.proj.weight[first], net.tokenizer.proj.weight[second] = 0.25, -0.25
    net.pos_embed.weight[0, :, :patches] = 8 * torch.eye(patches)
    attention, d = net.blocks[0].attn, dim // 3
    for norm in (net.blocks[0].norm1, net.norm):
        norm.weight.fill_(1)
    for head, patch in enumerate((looked_at, decides, looked_at)):
        attention.qkv.bias[head * d] = 100.0  # every query is the same
        attention.qkv.weight[dim + head * d, patch] = 1.0
    attention.qkv.weight[2 * dim + d, first], attention.qkv.weight[2 * dim + d, second] = 1.0, -1.0
    attention.proj.weight[first, d], attention.proj.weight[second, d] = 1.0, -1.0
    net.cls_token[..., 0] = 2.0  # so that the last norm does not make all brightness one
    net.head.weight[:, first] = torch.tensor([-1.0, 1.0])
    return net
