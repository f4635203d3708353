"""The outputs of a network: calibration, confusion, mistakes, and doubtful labels."""
