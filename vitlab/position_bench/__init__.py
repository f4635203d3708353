"""posbench: is a position embedding any good? Equal training, five tasks, paired seeds, a verdict for each task."""
