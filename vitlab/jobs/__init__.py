"""What is done with a run: train it, measure it, look at it, load it."""
