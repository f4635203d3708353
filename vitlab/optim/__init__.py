"""Optimizer groups, per-layer learning rates and learning-rate schedules."""

from vitlab.optim.groups import describe_groups, param_groups
from vitlab.optim.rows import slow_earlier_blocks
from vitlab.optim.schedule import warmed_up

__all__ = ["describe_groups", "param_groups", "slow_earlier_blocks", "warmed_up"]
