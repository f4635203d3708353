"""What decays, how fast each parameter learns, and the schedule."""

from vitlab.optim.groups import describe_groups, param_groups
from vitlab.optim.schedule import warmed_up

__all__ = ["describe_groups", "param_groups", "warmed_up"]
