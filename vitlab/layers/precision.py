"""Where autocast must not reach."""

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> torch.autocast:
    """Return a context in which operations on ``x`` keep its dtype; the meta device has no autocast to switch off.

    Example:
        >>> with without_autocast(torch.empty(1, device="meta")):
        ...     torch.is_autocast_enabled("cpu")
        False
    """
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)
