"""posbench: is a position embedding any good? Equal training, seven tasks, paired seeds, a verdict for each task."""
