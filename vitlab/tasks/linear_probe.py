"""Linear probe: a linear classifier on frozen features."""

from typing import Unpack

from vitlab.tasks.arguments import ClassifierArgs
from vitlab.tasks.classifier import Classifier


class LinearProbe(Classifier):
    """Train only the head; the rest of the network is frozen, without dropout or drop path.

    Args:
        **task: Passed to :class:`Classifier`.

    Example:
        >>> task = LinearProbe(num_classes=3, img_size=8, in_chans=1, patch_size=2, embed_dim=16, depth=2, num_heads=2)
        >>> [name for name, parameter in task.named_parameters() if parameter.requires_grad]
        ['net.head.weight', 'net.head.bias']
    """

    def __init__(self, **task: Unpack[ClassifierArgs]) -> None:
        super().__init__(**task)
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad = name.startswith("head.")

    def on_train_epoch_start(self) -> None:
        self.net.eval()
