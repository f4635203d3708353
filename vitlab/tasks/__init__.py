"""LightningModules: a network with its loss, metrics and optimizer."""

from vitlab.tasks.classifier import Classifier
from vitlab.tasks.dino import DINO
from vitlab.tasks.distillation import Distillation
from vitlab.tasks.linear_probe import LinearProbe
from vitlab.tasks.mae import MAE
from vitlab.tasks.regressor import Regressor

__all__ = ["DINO", "MAE", "Classifier", "Distillation", "LinearProbe", "Regressor"]
