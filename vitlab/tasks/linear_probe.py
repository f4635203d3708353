"""What frozen features are worth."""

from typing import Unpack

from vitlab.tasks.arguments import ClassifierArgs
from vitlab.tasks.classifier import Classifier


class LinearProbe(Classifier):
    """Train the head alone; everything before it stays as it was loaded, without dropout or drop path.

    Args:
        **task: Passed to :class:`Classifier`.
    """

    def __init__(self, **task: Unpack[ClassifierArgs]) -> None:
        super().__init__(**task)
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad = name.startswith("head.")

    def on_train_epoch_start(self) -> None:
        self.net.eval()
