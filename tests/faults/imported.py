"""What a server of processes does before it forks: it imports all that a command needs, and parses and hashes once."""

import gc
import importlib
import pkgutil

import vitlab
from vitlab.ablation.execution import identity, warm

MORE = ("sklearn.datasets", "scipy.stats", "wandb", "torch.distributed.run", "torch.utils.serialization.config")
MORE += ("matplotlib.backends.backend_svg", "matplotlib.backends.backend_pdf", "pyarrow.pandas_compat")
MORE += ("fsspec.implementations.chained", "PIL.JpegImagePlugin", "PIL.PngImagePlugin")

ours = [module.name for module in pkgutil.walk_packages(vitlab.__path__, "vitlab.") if "__main__" not in module.name]
for name in (*ours, *warm.OTHERS, *MORE):
    importlib.import_module(name)
warm._parse()
identity.code_digest()
gc.collect()
gc.freeze()  # the collector of a fork leaves these pages alone
