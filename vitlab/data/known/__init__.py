"""Data sets with known classes and sizes: published and synthetic ones."""
