"""A research framework for Vision Transformers: build, train, analyze, compare.

>>> import vitlab
>>> net = vitlab.create_model("t2t_vit_7", pos_embed="sincos2d", img_size=64)
>>> net.grid_size
(4, 4)

Names are imported on first use, so ``import vitlab`` is fast. Subpackages are available too:

>>> vitlab.tokenizers.soft_splits([7, 3])
[(7, 4, 2), (3, 2, 1)]
"""

import sys
from typing import TYPE_CHECKING

from vitlab.lazy import lazy

if sys.platform == "win32":
    raise ImportError("vitlab needs Linux; on Windows, install it in WSL (`wsl --install`), which is a Linux")

if TYPE_CHECKING:
    from vitlab import ablation as ablation
    from vitlab import analysis as analysis
    from vitlab import callbacks as callbacks
    from vitlab import data as data
    from vitlab import layers as layers
    from vitlab import look as look
    from vitlab import models as models
    from vitlab import optim as optim
    from vitlab import pretraining as pretraining
    from vitlab import stats as stats
    from vitlab import tasks as tasks
    from vitlab import tokenizers as tokenizers
    from vitlab.ablation.folds import cross_validate
    from vitlab.analysis.subject import Subject
    from vitlab.api import ablate, fit, load
    from vitlab.callbacks.attention_maps import AttentionMaps
    from vitlab.callbacks.checkpoint import Checkpoint
    from vitlab.callbacks.ema import EMA
    from vitlab.callbacks.quality import FeatureQuality
    from vitlab.data import (
        CIFAR10,
        CIFAR100,
        Arrays,
        Digits,
        FashionMNIST,
        HuggingFace,
        ImageFolder,
        ImageNet,
        Packed,
        PositionProbe,
        Table,
        Unlabeled,
        WebDataset,
    )
    from vitlab.data.base import ImageData
    from vitlab.layers.pos_embed import PosEmbed
    from vitlab.models.create import create_model
    from vitlab.models.sizes import SIZES
    from vitlab.models.vit import VisionTransformer
    from vitlab.position_bench.bench import posbench
    from vitlab.pretraining import DINO, MAE
    from vitlab.run import Run
    from vitlab.tasks import Classifier, Distillation, LinearProbe, MultiTask, Regressor
else:
    __getattr__, __dir__ = lazy(__name__)

__version__ = "0.2.0"

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "DINO",
    "EMA",
    "MAE",
    "SIZES",
    "Arrays",
    "AttentionMaps",
    "Checkpoint",
    "Classifier",
    "Digits",
    "Distillation",
    "FashionMNIST",
    "FeatureQuality",
    "HuggingFace",
    "ImageData",
    "ImageFolder",
    "ImageNet",
    "LinearProbe",
    "MultiTask",
    "Packed",
    "PosEmbed",
    "PositionProbe",
    "Regressor",
    "Run",
    "Subject",
    "Table",
    "Unlabeled",
    "VisionTransformer",
    "WebDataset",
    "ablate",
    "create_model",
    "cross_validate",
    "fit",
    "load",
    "posbench",
]
