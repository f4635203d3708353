"""Sets of images that are known before they are read: published ones, and made ones."""
