"""A research framework for Vision Transformers."""

__version__ = "0.1.0"
