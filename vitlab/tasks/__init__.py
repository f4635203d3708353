"""LightningModules: a network with its loss, metrics and optimizer; those without labels are in `pretraining`."""

from vitlab.lazy import lazy
from vitlab.tasks.classifier import Classifier, LinearProbe
from vitlab.tasks.distillation import Distillation
from vitlab.tasks.multi_task import MultiTask
from vitlab.tasks.regressor import Regressor

__all__ = ["Classifier", "Distillation", "LinearProbe", "MultiTask", "Regressor"]

__getattr__, _ = lazy(__name__, {"vitlab.pretraining": ("DINO", "MAE")})  # their home until 0.1
