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
