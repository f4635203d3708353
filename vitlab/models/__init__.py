"""Vision Transformers: build one by name, load one from a file, read its tokens and attention."""

from typing import TYPE_CHECKING

from vitlab.lazy import lazy

if TYPE_CHECKING:
    from vitlab.models.cost import count_macs, count_parameters
    from vitlab.models.create import create_model
    from vitlab.models.load import load_network, load_weights
    from vitlab.models.sizes import SIZES
    from vitlab.models.vit import VisionTransformer
    from vitlab.models.walk import attention_logits, attention_maps, block_tokens
else:  # imported on first use: a list of sizes needs no torch
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "SIZES",
    "VisionTransformer",
    "attention_logits",
    "attention_maps",
    "block_tokens",
    "count_macs",
    "count_parameters",
    "create_model",
    "load_network",
    "load_weights",
]
