"""Typed dictionaries of the tasks' arguments; a test compares them with the classes."""

from collections.abc import Sequence
from typing import Any, Literal

from vitlab.class_paths import ClassSpec
from vitlab.layers.compiled import CompileMode
from vitlab.models.arguments import NetworkArgs
from vitlab.optim import ScheduleName
from vitlab.tasks.schedule import SchedulerSpec


class TaskArgs(NetworkArgs, total=False):
    """Arguments of every task: the recipe, and the network."""

    metrics: Sequence[str | ClassSpec]
    opt: str | ClassSpec
    lr_scheduler: ScheduleName | str | SchedulerSpec
    lr: float
    lr_scale: Literal["none", "linear", "sqrt"]
    lr_batch: int
    min_lr: float
    warmup_epochs: float
    warmup_lr: float
    cooldown_epochs: float
    weight_decay: float
    layer_decay: float
    pos_embed_lr_mult: float
    head_lr_mult: float
    freeze: Sequence[str]
    nan_loss: Literal["stop", "skip"]
    compile: bool | CompileMode


class ClassifierArgs(TaskArgs, total=False):
    """Arguments of :class:`vitlab.tasks.classifier.Classifier`."""

    num_classes: int
    label_smoothing: float
    loss: Literal["ce", "bce"]
    class_weights: Sequence[float] | Literal["balanced"] | None
    targets: dict[str, Any] | None
