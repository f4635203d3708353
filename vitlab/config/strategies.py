"""Distributed strategies that vitlab adds to Lightning's: the values of `trainer.strategy`."""

import inspect
import secrets
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vitlab.callbacks.ema import EMA
from vitlab.class_paths import choice_text, name_and_args
from vitlab.errors import UsageError, did_you_mean, preview
from vitlab.runs.format import migrate
from vitlab.runs.generations import BackgroundCheckpointIO, NotSaved, refuse_objects, snapshot
from vitlab.runs.shards import FOLDER, fill, reader, write_shards

# DDP does not send buffers before each forward pass: ranks that evaluate unequal numbers of batches would wait forever.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters  # torch 2.14
DDP: dict[str, Any] = {
    "forward_sync_buffers" if _RENAMED else "broadcast_buffers": False,
    "gradient_as_bucket_view": True,
}
SHARDED = (  # optimizers whose steps on shards are those on whole weights
    *("adamw", "sgd", "momentum", "adam", "nadamw", "lamb", "lars", "lion", "muon", "adopt", "rmsproptf"),
    *("SGD", "AdamW", "Adam", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax"),
)


class _MeasuresWhatIsSaved:
    """A strategy whose processes evaluate with the buffers of the first, which are saved."""

    lightning_module: Any

    def on_validation_start(self) -> None:
        """Give all processes the buffers of the first, such as the running statistics of a BatchNorm, or counts.

        Those of an average, too, which the network is given only after this.
        """
        for module in (self.lightning_module, *_averages(self.lightning_module)):
            for buffer in _each_in_its_memory(module):
                torch.distributed.broadcast(buffer.view(-1).view(torch.uint8), 0)  # gloo knows few types

    on_test_start = on_validation_start  # perhaps right after steps that no validation has followed


def _each_in_its_memory(module: Any) -> list[torch.Tensor]:
    """Return the buffers of a module, to be written into: expanded ones, whose values share memory, get their own."""
    for buffer in module.buffers():
        if not buffer.is_contiguous():
            buffer.data = buffer.contiguous()
    return [buffer.detach() for buffer in module.buffers()]


class PlainReplicate(_MeasuresWhatIsSaved, DDPStrategy):
    """Every process has all weights, and gradients are averaged, where each step has the same graph."""

    def configure_ddp(self) -> None:
        """Wrap the network, whose buffers DDP fills with those of the first process."""
        _each_in_its_memory(self.model)
        super().configure_ddp()


class Replicate(PlainReplicate):
    """Every process has all weights, and gradients are averaged: DDP, Li et al. 2020 (arXiv:2006.15704).

    DDP sums gradients in buckets, and rebuilds the buckets after its first step in the order in which gradients
    arrived. With three processes or more the sums then round differently, so a resumed run would differ from an
    uninterrupted one. Here the buckets reach their final order before training starts.
    """

    def configure_ddp(self) -> None:
        """Wrap the network, and reduce a gradient of zeros once."""
        super().configure_ddp()
        ddp: Any = self.model
        ddp.module.forward = lambda zero: sum((p.sum() * 0 for p in ddp.module.parameters() if p.requires_grad), zero)
        ddp(torch.zeros((), device=self.root_device)).backward()
        del ddp.module.forward
        ddp.zero_grad(set_to_none=True)


class FullyShard(_MeasuresWhatIsSaved, ModelParallelStrategy):
    """Each process keeps its share of weights, gradients and moments: FSDP2, Zhao et al. 2023 (arXiv:2304.11277).

    For networks that do not fit on one GPU together with the optimizer's moments. Each process writes its share into
    a folder beside the checkpoint (:mod:`vitlab.runs.shards`), on a disk that all processes see. Such a run resumes
    only under this strategy, on any number of processes.
    """

    def __init__(self) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=1)

    def setup_environment(self) -> None:
        """Make one group of all processes, and shard the network when Lightning configures it.

        Raises:
            UsageError: The configuration has a plugin of its own that writes checkpoints.
        """
        if (given := type(self.checkpoint_io)) not in (TorchCheckpointIO, BackgroundCheckpointIO):
            raise UsageError(f"`trainer.strategy=fsdp2` writes its checkpoints itself: leave {given.__name__} out")
        self.checkpoint_io: BackgroundCheckpointIO = BackgroundCheckpointIO()
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
        self._writers = torch.distributed.new_group(backend="gloo")  # training keeps its own group busy
        task: Any = self.lightning_module
        task.configure_model = self._shard_all

    def _shard_all(self) -> None:
        check_shards(self.lightning_module)
        mesh = self.device_mesh["data_parallel"]
        for task in (self.lightning_module, *_averages(self.lightning_module)):
            _shard(task.net, mesh)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Start to write a copy of the shards on all processes; then rank 0 writes the file that lists them.

        Raises:
            UsageError: It holds what could not be read again.
            NotSaved: The checkpoint could not be written, where no callback waits for it.
        """
        path = Path(self.broadcast(filepath))
        folder = path.parent / self.broadcast(f"{FOLDER}{secrets.token_hex(4)}")
        tensors = _pop_tensors(checkpoint).items()  # what each process has whole, as buffers, is that of the first
        mine = {key: value for key, value in tensors if self.is_global_zero or isinstance(value, DTensor)}
        flat = {key: value.detach().clone() for key, value in mine.items()}
        refuse_objects(checkpoint)
        content = snapshot(checkpoint, {})
        size = sum(tensor.nbytes for tensor in flat.values())
        finish = self.checkpoint_io.take_finish()
        self.checkpoint_io.begin(partial(self._write, flat, folder, content, path, finish), path, size)
        if finish is None and (failure := self.checkpoint_io.wait()):  # no callback waits for it
            raise NotSaved(failure)

    def _write(
        self, flat: dict[str, torch.Tensor], folder: Path, content: dict[str, Any], path: Path, finish: Any
    ) -> None:
        files = write_shards(flat, folder, self.global_rank, self._writers)
        if self.is_global_zero:
            self.checkpoint_io.write(content | {"shards": {"folder": folder.name, "files": files}}, path, finish)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the part of the shards that this process needs; older runs have unsharded weights."""
        path = Path(self.broadcast(checkpoint_path))
        content: dict[str, Any] = migrate(torch.load(path, map_location="cpu", weights_only=True))
        if "shards" not in content:
            self._save_distributed_checkpoint = False
            try:
                return super().load_checkpoint(path, weights_only)
            finally:
                self._save_distributed_checkpoint = True
        net: Any = self.model
        weights: dict[str, Any] = get_model_state_dict(net)
        sections = {"state_dict": weights}
        if "averaging_state" in content:  # an average is kept: it is what `state_dict` holds
            sections = {"state_dict": {k: torch.empty_like(v) for k, v in weights.items()}, AVERAGED: weights}
        source = reader(path.parent / Path(content["shards"]["folder"]).name)
        parts = source.read_metadata().state_dict_metadata
        sizes = {key: (part.size, part.properties.dtype) for key, part in parts.items()}
        places = dict(net.named_parameters())
        states = [_empty_state(f"optimizer_{i}.", sizes, places) for i in range(len(self.optimizers))]
        fill(_flat(sections, states), source, alone=False)
        for optimizer, state, kept in zip(self.optimizers, states, content["optimizer_states"], strict=False):
            rest = kept.get("state", {})
            whole: dict[str, Any] = {name: {**rest.get(name, {}), **state.get(name, {})} for name in {**rest, **state}}
            set_optimizer_state_dict(net, optimizer, {**kept, "state": whole})
        set_model_state_dict(net, weights if _averages(self.lightning_module) else sections["state_dict"])
        return content | sections


def _averages(task: Any) -> list[Any]:
    """Return the copy of a task that holds an average of its weights, if one is kept."""
    kept = [one._average_model for one in task.trainer.callbacks if isinstance(one, WeightAveraging)]
    return [average.module for average in kept if average is not None]


AVERAGED = "current_model_state"  # Lightning's name of the weights that are trained beside their average


def _pop_tensors(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Take what is sharded out of a checkpoint: weights, their average, and what an optimizer keeps of each weight.

    What it keeps that is no tensor stays, such as whether Muon orthogonalizes a weight's updates.
    """
    sections = {name: checkpoint.pop(name) for name in ("state_dict", AVERAGED) if name in checkpoint}
    states = list[dict[str, Any]]()
    for optimizer in checkpoint["optimizer_states"]:
        pairs = [(name, key, value) for name, state in optimizer.pop("state").items() for key, value in state.items()]
        tensors, rest = dict[str, Any](), dict[str, Any]()
        for name, key, value in pairs:
            (tensors if isinstance(value, torch.Tensor) else rest).setdefault(name, {})[key] = value
        states.append(tensors)
        if rest:
            optimizer["state"] = rest
    return _flat(sections, states)


def _flat(sections: dict[str, dict[str, Any]], states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    flat = {f"{section}.{name}": value for section, weights in sections.items() for name, value in weights.items()}
    for i, state in enumerate(states):
        flat |= {f"optimizer_{i}.{name}.{k}": v for name, values in state.items() for k, v in values.items()}
    return flat


def _empty_state(
    prefix: str, sizes: dict[str, tuple[torch.Size, torch.dtype]], places: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return tensors for what an optimizer had kept of each weight, sharded as the weight if they are of its size."""
    found = dict[str, dict[str, torch.Tensor]]()
    for key, (size, dtype) in sizes.items():
        if key.startswith(prefix):
            name, _, part = key.removeprefix(prefix).rpartition(".")
            like = places[name]
            whole = like.shape == size
            found.setdefault(name, {})[part] = (
                torch.zeros_like(like, dtype=dtype) if whole else torch.zeros(size, dtype=dtype)
            )
    return found


def _shard(net: Any, mesh: DeviceMesh) -> None:
    if not isinstance(net, FSDPModule):
        for part in (*net.blocks, net):
            fully_shard(part, mesh=mesh)


StrategyRegistry.register("ddp", Replicate, override=True, **DDP)
StrategyRegistry.register("ddp_static", PlainReplicate, **DDP, static_graph=True)
StrategyRegistry.register("ddp_bf16", Replicate, **DDP, ddp_comm_hook=bf16_compress_hook)
StrategyRegistry.register("fsdp2", FullyShard)
UNUSED = "ddp_find_unused_parameters_true"  # Lightning's name
StrategyRegistry.register(UNUSED, Replicate, override=True, **DDP, find_unused_parameters=True)


def divide_by_all_images(strategy: Any) -> None:
    """Let Lightning's means over processes be over all images, of which each may have another number.

    It divides sums by a mean of whole numbers, and rounds that down: of 12 and 11 images to 11.
    """
    as_it_was = strategy.reduce

    def reduce(tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:  # no partial: Lightning copies it
        if reduce_op == "mean" and isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
            tensor = tensor.float()
        return as_it_was(tensor, group, reduce_op)

    strategy.reduce = reduce


def check_strategy_name(name: Any) -> None:
    """Refuse a strategy that is not registered, and suggest the closest."""
    if isinstance(name, str) and name != "auto" and name not in (known := StrategyRegistry.available_strategies()):
        raise UsageError(
            f'`trainer.strategy` must be auto or a name such as ddp, got "{name}"{did_you_mean(name, known)}'
        )


def check_shards(task: Any) -> None:
    """Refuse parameters that are trained outside of a sharded network, each process its own, and what has no shards."""
    if outside := [name for name, p in task.named_parameters() if p.requires_grad and not name.startswith("net.")]:
        raise UsageError(
            f"`trainer.strategy=fsdp2` shards `net` alone, and {type(task).__name__} trains {preview(outside)} outside "
            "of it, of which each process would have its own: use ddp"
        )
    if single := [f"net.{name}" for name, p in task.net.named_parameters() if p.ndim == 0]:
        what = f"{preview(single)}, which has no dimension to divide"
        raise UsageError(f"`trainer.strategy=fsdp2` shards no {what}: make it a list of one value, or use ddp")
    if extra := [name for name in task.state_dict() if name.endswith("_extra_state")]:
        raise UsageError(f"`trainer.strategy=fsdp2` keeps tensors alone, and no {preview(extra)}: use ddp")


def check_strategy(name: Any, trainer: L.Trainer, opt: Any) -> None:
    """Refuse settings that a strategy does not support.

    Args:
        name: Name of the strategy.
        trainer: The trainer that was built with it.
        opt: Name of the optimizer.
    """
    if name == "ddp_bf16" and trainer.strategy.root_device.type != "cuda":
        raise UsageError("`trainer.strategy=ddp_bf16` compresses gradients between GPUs; on a CPU use ddp")
    if name == "ddp_static" and trainer.accumulate_grad_batches > 1:
        raise UsageError("`trainer.strategy=ddp_static` cannot accumulate gradients; use ddp")
    if isinstance(trainer.strategy, FullyShard):
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging) and not isinstance(callback, EMA):
                raise UsageError(
                    f"`trainer.strategy=fsdp2` averages weights with EMA alone, not {type(callback).__name__}"
                )
            if getattr(callback, "needs_whole_weights", False):
                name = type(callback).__name__
                raise UsageError(f"`trainer.strategy=fsdp2` shards the weights that {name} needs whole: leave it out")
        if opt is None:
            raise UsageError("`trainer.strategy=fsdp2` only shards networks of vitlab; use ddp")
        if name_and_args("opt", opt)[0] not in SHARDED:
            got = f"got `model.opt={choice_text(opt)}`"
            raise UsageError(f"`trainer.strategy=fsdp2` shards the states of {', '.join(SHARDED)}, {got}")
