"""The header of a run on the terminal."""

import math
from datetime import timedelta
from typing import Any, ClassVar

import torch
from lightning.pytorch.callbacks import Timer
from torch import Tensor
from torch.nn.parameter import is_lazy

from vitlab.class_paths import choice_text
from vitlab.data.base import ImageData
from vitlab.data.loading.sizes import size_text
from vitlab.interface import PAGE, has_grid, hparams_of, network, own_parts, path_of, redefines, trained
from vitlab.jobs.train.initial import since_the_weights
from vitlab.jobs.train.job import Job
from vitlab.layers.custom import spare
from vitlab.layers.plain import is_sharded
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.pos_embed.rotary import RoPE2d
from vitlab.layers.precision import EMULATED, float32_precision, half_precision
from vitlab.models.cost import call_on_meta, count_all_parameters
from vitlab.tables import counted
from vitlab.tasks.base import Task
from vitlab.tasks.distillation import Distillation
from vitlab.tasks.schedule import SHAPES, schedule_and_args
from vitlab.tokenizers.t2t import T2TTokenizer


def header(job: Job) -> str:
    """Return the header of a run: model, data, training, directory."""
    lines = {
        "model": _model_line(job.task, job.facts) if has_grid(job.task) else _own_model_line(job.task, job.facts),
        "data": "\n       ".join([_data_line(job.data), *since_the_weights(job)]),
        "train": _train_line(job),
    }
    if isinstance(job.task, Distillation):
        lines["from"] = _teacher_line(job.task)
    lines["run"] = str(job.run.path) + (" (continued)" if job.resumed else "")
    if slow := _emulated(job.trainer):
        lines["slow"] = slow
    if job.wandb_line:
        lines["W&B"] = job.wandb_line
    return "\n".join(f"{name:<6} {text}" for name, text in lines.items())


def _model_line(task: Task, facts: dict[str, Any]) -> str:
    net: Any = task.net
    h, w = net.grid_size
    size = f"{_parameters(facts)}, {facts['macs'] / 1e6:,.4g} M multiply-adds per image"
    tokens = f"{type(net.tokenizer).__name__}, {h}x{w} tokens of width {net.embed_dim}"
    heads = net.num_heads
    q = torch.zeros(1, heads, net.num_prefix_tokens + h * w, net.embed_dim // heads)
    with torch.random.fork_rng(devices=[]):  # the training draws the same numbers after it
        acting = net.pos_embed.for_batch()
    free = acting.bias(0) is None and acting.relate(q, q, 0) is None
    note = "" if free else "; its attention bias rules out flash kernels"
    note += _idle_options(net.pos_embed) + _idle_hooks(network(task))
    if isinstance(net.tokenizer, T2TTokenizer) and (aside := net.tokenizer.unfused_options()):
        note += f"; {' and '.join(aside)}: the soft splits use the slower plain implementation"
    positions = choice_text(hparams_of(task).get("pos_embed", type(net.pos_embed).__name__))
    size += _beside(task)
    return f"{tokens}, {counted(len(net.blocks), 'block')}, position embedding {positions}: {size}{note}"


def _parameters(facts: dict[str, Any]) -> str:
    """Return how many values a network has, and how many of them are trained unless all are."""
    trained, total = facts["parameters"], facts["parameters_total"]
    if not total:  # in a dry run
        return "no parameters before its `setup`"
    return f"{total / 1e6:.3g} M parameters" + (f" ({trained:,} trained)" if trained != total else "")


def _beside(task: Any) -> str:
    """Return how many values are trained outside of the network, such as those of a decoder; empty if none are."""
    inside = {id(p) for p in trained(task).parameters()}
    outside = (p for p in task.parameters() if id(p) not in inside and not is_lazy(p))
    n = sum(p.numel() for p in outside if p.requires_grad)
    return f"; {n:,} more are trained outside the network" if n else ""


def _idle_options(pos_embed: PosEmbed) -> str:
    """Return a remark on options that a method has, but not here: a trained table has no formula to resize it by."""
    for part in pos_embed.modules():
        if isinstance(part, RoPE2d) and part.register_theta is not None and part.num_prefix_tokens < 4:
            return f"; `pos_embed.register_theta` has no effect below 4 prefix tokens, here {part.num_prefix_tokens}"
        if not isinstance(part, PosEmbed) or (policy := part.chosen_policy) is None:
            continue
        if policy not in part.policies_for(state := part.state_dict()):
            usual = part.usual_policy(state)
            return f"; `pos_embed.resize` {policy} has no effect: these positions are resized by {usual}"
    return ""


def _idle_hooks(net: Any) -> str:
    """Return a remark on hooks of the position embedding that no block calls, as one of the user's may forget to.

    Tried on the meta device; no remark where that fails, as for a block that reads values or other attributes.
    """
    if not own_parts(net.blocks) or any(is_sharded(part) for part in net.modules()):
        return ""
    if (trial := spare(net, [*net.parameters(), *net.buffers()])) is net:
        return ""
    trial.pos_embed, called = _Noting(net.pos_embed.grid_size), _Noting.called
    called.clear()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            call_on_meta(trial.eval(), torch.empty(1, net.in_chans, *net.img_size, device="meta"))
    except Exception:  # foreign code can raise anything
        return ""
    for part in net.pos_embed.single_methods().values():
        hooks = ["rotate", "bias", "relate", "leave"]
        hooks += [] if isinstance(part, AddedPosEmbed) and part.join == "stem" else ["enter"]
        own = [name for name in hooks if getattr(type(part), name) is not getattr(PosEmbed, name)]
        if idle := [f"`{name}`" for name in own if name not in called]:
            what = f"{' or '.join(idle)} of {type(part).__name__}, which so changes nothing"
            return f"; no block of yours calls {what} ({PAGE})"
    return ""


class _Noting(PosEmbed):
    """Keeps the names of those of its hooks that are called, also of its copies."""

    called: ClassVar[set[str]] = set()

    def enter(self, x: Tensor, layer: int) -> Tensor:
        self.called.add("enter")
        return x

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        self.called.add("rotate")
        return x

    def bias(self, layer: int) -> None:
        self.called.add("bias")

    def relate(self, q: Tensor, k: Tensor, layer: int) -> None:
        self.called.add("relate")

    def leave(self, x: Tensor, layer: int) -> Tensor:
        self.called.add("leave")
        return x


def _own_model_line(task: Any, facts: dict[str, Any]) -> str:
    size = f"{path_of(task)}: {_parameters(facts)}"
    if "macs" in facts:
        return f"{size}, {facts['macs'] / 1e6:,.4g} M multiply-adds per image{_beside(task)}"
    why = "multiply-adds unknown: counting needs `img_size`, `in_chans` and a forward of images"
    return f"{size}; {why}{_beside(task)}"


def _teacher_line(task: Distillation) -> str:
    teacher, hparams = task.teacher, task.hparams
    size = count_all_parameters(teacher) / 1e6
    return (
        f"teacher {hparams['teacher']} ({type(teacher.net).__name__}, {size:.3g} M parameters), {hparams['distill']}, "
        f"{hparams['distill_alpha']:.0%} of the loss"
    )


def _emulated(trainer: Any) -> str | None:
    """Return a line on half precision whose products this CPU lacks; None if it has them, or none are asked for."""
    if trainer.strategy.root_device.type != "cpu" or half_precision(trainer.precision) not in EMULATED:
        return None
    return f"this CPU emulates precision {trainer.precision}; use --trainer.precision=32-true"


def _data_line(data: Any) -> str:
    if not isinstance(data, ImageData):
        known = "recorded by its" if hasattr(data, "fingerprint") else "not recorded, as it has no"
        place = "a run resumed within an epoch sees other batches, unless the loader has `state_dict`"
        return f"{path_of(data)}; its samples are {known} `fingerprint`; {place}"
    data.compare_with_test()
    facts = data.fingerprint()
    splits = facts["splits"]
    size = "x".join(map(str, (data.in_chans, *data.img_size)))
    counts = f"{splits['train']['n']:,} training and {splits['val']['n']:,} validation images"
    line = f"{type(data).__name__}: {counts} of {size}, {_kinds(data)}, {data.pipeline}"
    line += f" ({found}; see data.json)" if (found := _faults(facts)) else ""
    leaks = [pair for pair in facts["first_duplicates"] if [name.split(":")[0] for name in pair] == ["train", "test"]]
    warnings = [f"training images are in the test split: {' = '.join(pair)}" for pair in leaks[:1]]
    return "\n       ".join([line, *facts["notes"], *warnings])


def _faults(facts: dict[str, Any]) -> str:
    """Return the faults of the images that the fingerprint of the data counts; empty if there are none."""
    splits = facts["splits"]
    faults = {
        "unreadable and left out": len(facts["unreadable"]),
        "the same in two splits": facts["duplicates"],
        "nearly the same in two splits": facts["near_duplicates"],
        "the same under two labels": facts["contradictions"],
        "classes without training images": splits["train"].get("class_counts", []).count(0),
        "classes without validation images": splits["val"].get("class_counts", []).count(0),
    }
    return ", ".join(f"{fault}: {n:,}" for fault, n in faults.items() if n)


def _kinds(data: ImageData) -> str:
    """Return the number of classes or labels, or of targets per image, in words."""
    if data.class_names == ["unlabeled"]:
        return "no labels"
    if data.num_classes:
        return counted(data.num_classes, "label" if data.targets["kind"] == "multilabel" else "class")
    return f"{counted(len(data.targets['names']), 'target' if data.targets['kind'] == 'mixed' else 'number')} each"


def _train_line(job: Job) -> str:
    trainer, batch = job.trainer, job.batch
    device = type(trainer.accelerator).__name__.removesuffix("Accelerator")
    parts = [_length(trainer)]
    parts += [f"batch {batch}"] if batch else []
    parts += _sizes_beyond(job)
    if isinstance(job.task, Task) and redefines(job.task, "configure_optimizers"):
        parts.append(f"optimized by configure_optimizers of {type(job.task).__name__}")
    elif isinstance(job.task, Task):
        parts += [_optimization(job.task), *_at_one_end(job.task, trainer)]
    parts += [f"seed {job.config.seed_everything}", f"{trainer.num_devices * trainer.num_nodes} x {device}"]
    rounded = float32_precision(trainer.strategy.root_device.type)
    words = dict.fromkeys(rounded.values()) if len({*rounded.values()}) == 1 else map(" ".join, rounded.items())
    return ", ".join([*parts, f"precision {trainer.precision} (float32: {', '.join(words)})"])


def _length(trainer: Any) -> str:
    """Return how long a training is, by the limits that it has."""
    counts = (trainer.max_epochs, "epoch"), (trainer.max_steps, "step")
    limits = [f"{n} {unit}{'s' * (n != 1)}" for n, unit in counts if n is not None and n != -1]
    left = [timer.time_remaining() for timer in trainer.callbacks if isinstance(timer, Timer)]
    limits += [f"{timedelta(seconds=round(seconds))} by the clock" for seconds in left if seconds is not None]
    return ", at most ".join(limits) or "until it is stopped"


def _epochs(trainer: Any) -> float:
    """Return the most epochs that a training has, one where images have no number; infinite while it is not known."""
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    if trainer.train_dataloader is not None and math.isinf(batches):
        return 1
    per_epoch = max(1, math.ceil(batches / trainer.accumulate_grad_batches)) if math.isfinite(batches) else 0
    by_steps = trainer.max_steps / per_epoch if trainer.max_steps > 0 and per_epoch else math.inf
    return min(math.inf if epochs in (None, -1) else epochs, by_steps)


def _sizes_beyond(job: Job) -> list[str]:
    """Say so where the training ends before it comes to the last size of its images, that of evaluation."""
    steps = job.data.pipeline.sizes.steps if isinstance(job.data, ImageData) else []
    is_beyond = steps and 0 < _epochs(job.trainer) <= steps[-1][0]
    return [f"no epoch at {size_text(steps[-1][1])} (data.img_size_schedule)"] if is_beyond else []


def _optimization(task: Task) -> str:
    hparams = task.hparams
    decayed = sum(p.numel() for g in task.optimizer_groups() if g["weight_decay"] for p in g["params"])
    words = choice_text(hparams["opt"]), _peak(task), f"weight decay {hparams['weight_decay']:g}"
    return f"{', '.join(words)} on {decayed:,} weights"


def _at_one_end(task: Task, trainer: Any) -> list[str]:
    """Say so where the training is no longer than its warm-up, and so ends at the peak rate, or than its cool-down.

    Where both together leave no epoch for the schedule, the rate falls from near its peak to its end in a step.
    """
    name, _ = schedule_and_args("lr_scheduler", task.hparams["lr_scheduler"])
    if name not in SHAPES or not (epochs := _epochs(trainer)):
        return []
    unnumbered = math.isinf(trainer.num_training_batches) and trainer.train_dataloader is not None
    why = "; images without a number are one epoch" if unnumbered else ""
    ends = (("warm-up", "warmup_epochs"), ("cool-down", "cooldown_epochs"))  # the warm-up comes first
    told = [(end, key) for end, key in ends if task.hparams[key] >= epochs]
    if not told and all(given := [task.hparams[key] for _, key in ends]) and sum(given) >= epochs:
        keys = ", ".join(f"model.{key} {task.hparams[key]:g}" for _, key in ends)
        return [f"nothing between warm-up and cool-down ({keys}{why})"]
    return [f"all of it {end} (model.{key} {task.hparams[key]:g}{why})" for end, key in told[:1]]


def _peak(task: Task) -> str:
    """Return the peak learning rate, with that of the head if it is another, or the class that sets it."""
    hparams, rate = task.hparams, task.peak_rate()
    if task.sets_own_peak:
        idle = [name for name in ("layer_decay", "pos_embed_lr_mult", "head_lr_mult") if hparams[name] != 1]
        name, _ = schedule_and_args("lr_scheduler", hparams["lr_scheduler"])
        return f"lr set by {name}" + (f" for all layers, in spite of {' and '.join(idle)}" if idle else "")
    head = hparams["head_lr_mult"]
    return f"lr {rate:g}{f' (head {rate * head:g})' if head != 1 else ''}"
