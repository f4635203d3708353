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
