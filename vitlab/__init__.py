"""A research framework for Vision Transformers: build, train, look inside, compare.

>>> import vitlab
>>> net = vitlab.create_model("t2t_vit_7", pos_embed="sincos2d", img_size=64)
>>> net.grid_size
(4, 4)

Names are imported when they are used, so ``import vitlab`` itself takes no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitlab.analysis.subject import Subject
    from vitlab.api import ablate, fit, load
    from vitlab.callbacks.attention_maps import AttentionMaps
    from vitlab.callbacks.checkpoint import Checkpoint
    from vitlab.callbacks.ema import EMA
    from vitlab.data import (
        CIFAR10,
        CIFAR100,
        Digits,
        FashionMNIST,
        HuggingFace,
        ImageFolder,
        ImageNet,
        Packed,
        PositionProbe,
    )
    from vitlab.data.base import ImageData
    from vitlab.layers.pos_embed import PosEmbed
    from vitlab.models.create import create_model
    from vitlab.models.sizes import SIZES
    from vitlab.models.vit import VisionTransformer
    from vitlab.run import Run
    from vitlab.tasks import Classifier, Distillation, LinearProbe, Regressor

__version__ = "0.1.0"

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMA",
    "SIZES",
    "AttentionMaps",
    "Checkpoint",
    "Classifier",
    "Digits",
    "Distillation",
    "FashionMNIST",
    "HuggingFace",
    "ImageData",
    "ImageFolder",
    "ImageNet",
    "LinearProbe",
    "Packed",
    "PosEmbed",
    "PositionProbe",
    "Regressor",
    "Run",
    "Subject",
    "VisionTransformer",
    "ablate",
    "create_model",
    "fit",
    "load",
]

_HOMES = {
    "vitlab.analysis.subject": ("Subject",),
    "vitlab.api": ("ablate", "fit", "load"),
    "vitlab.callbacks.attention_maps": ("AttentionMaps",),
    "vitlab.callbacks.checkpoint": ("Checkpoint",),
    "vitlab.callbacks.ema": ("EMA",),
    "vitlab.data": (
        *("CIFAR10", "CIFAR100", "Digits", "FashionMNIST", "HuggingFace", "ImageFolder", "ImageNet", "Packed"),
        "PositionProbe",
    ),
    "vitlab.data.base": ("ImageData",),
    "vitlab.layers.pos_embed": ("PosEmbed",),
    "vitlab.models.create": ("create_model",),
    "vitlab.models.sizes": ("SIZES",),
    "vitlab.models.vit": ("VisionTransformer",),
    "vitlab.run": ("Run",),
    "vitlab.tasks": ("Classifier", "Distillation", "LinearProbe", "Regressor"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    if name not in _HOME:
        raise AttributeError(f"module 'vitlab' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
