"""What a server of processes loads before it forks: all that a command imports, and the parsers of all classes."""

import gc
import importlib

from vitlab.ablation.execution import warm

MORE = ("vitlab.cli.main", "vitlab.cli.evaluate", "vitlab.look.command", "vitlab.callbacks.ema")
MORE += ("sklearn.datasets", "scipy.stats", "wandb", "torch.distributed.run")

for name in (*(f"vitlab.{room}" for room in warm.ROOMS), *warm.OTHERS, *MORE):
    importlib.import_module(name)
warm._parse()
gc.collect()
gc.freeze()  # the collector of a fork leaves these pages alone
