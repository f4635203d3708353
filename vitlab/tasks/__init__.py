"""LightningModules: a network with its loss, metrics and optimizer."""

from vitlab.tasks.classifier import Classifier
from vitlab.tasks.regressor import Regressor

__all__ = ["Classifier", "Regressor"]
