"""From images to batches: which samples, how they are cropped and augmented, and the loaders."""
