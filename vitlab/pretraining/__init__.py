"""LightningModules that train without labels; the core stands without this room."""

from vitlab.pretraining.dino import DINO
from vitlab.pretraining.mae import MAE

__all__ = ["DINO", "MAE"]
