"""How the processes of a run work together: the strategies that `trainer.strategy` names beside Lightning's own."""

import inspect
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from vitlab.classes import name_and_args, told
from vitlab.errors import UsageError, did_you_mean

# Buffers are constants, so DDP need not send them; ranks that evaluate unequal numbers of batches would wait for ever.
# torch 2.14 has a new word for it.
NEW = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
DDP: dict[str, Any] = {"forward_sync_buffers" if NEW else "broadcast_buffers": False, "gradient_as_bucket_view": True}


class FullyShard(ModelParallelStrategy):
    """Each process keeps its share of weights, gradients and moments: FSDP2, Zhao et al. 2023 (arXiv:2304.11277).

    For networks that do not fit beside their moments on one GPU. A checkpoint is one file; its weights are whole, and
    its moments, too, but numbered in an order of their own: it continues under this strategy alone, on any number of
    processes.
    """

    def __init__(self) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Make one group of all processes, and shard the network where Lightning configures it."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
        task: Any = self.lightning_module
        task.configure_model = partial(_shard, task.net, self.device_mesh["data_parallel"])


def _shard(net: Any, mesh: DeviceMesh) -> None:
    if not isinstance(net, FSDPModule):
        for part in (*net.blocks, net):
            fully_shard(part, mesh=mesh)


StrategyRegistry.register("ddp", DDPStrategy, override=True, **DDP)
StrategyRegistry.register("ddp_static", DDPStrategy, **DDP, static_graph=True)
StrategyRegistry.register("ddp_bf16", DDPStrategy, **DDP, ddp_comm_hook=bf16_compress_hook)
StrategyRegistry.register("fsdp2", FullyShard)


def check_name(name: Any) -> None:
    """Refuse a strategy that nobody has registered, with the closest that there is."""
    if isinstance(name, str) and name != "auto" and name not in (known := StrategyRegistry.available_strategies()):
        raise UsageError(
            f'`trainer.strategy` must be auto or a name such as ddp, got "{name}"{did_you_mean(name, known)}'
        )


def check_strategy(name: Any, trainer: L.Trainer, opt: Any) -> None:
    """Refuse what a strategy cannot do.

    Args:
        name: Name of the strategy.
        trainer: The trainer that was built with it.
        opt: Name of the optimizer.
    """
    if name == "ddp_bf16" and trainer.strategy.root_device.type != "cuda":
        raise UsageError("`trainer.strategy=ddp_bf16` halves what GPUs send each other through NCCL; on a CPU use ddp")
    if name == "ddp_static" and trainer.accumulate_grad_batches > 1:
        raise UsageError("`trainer.strategy=ddp_static` does not accumulate; use ddp with accumulate_grad_batches")
    if isinstance(trainer.strategy, FullyShard):
        if any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise UsageError("`trainer.strategy=fsdp2` keeps no EMA: leave the callback out, or use ddp")
        if opt is None:
            raise UsageError("`trainer.strategy=fsdp2` shards networks of vitlab alone; use ddp")
        if name_and_args("opt", opt)[0] != "adamw":
            raise UsageError(f"`trainer.strategy=fsdp2` shards the moments of adamw alone, got `model.opt={told(opt)}`")
