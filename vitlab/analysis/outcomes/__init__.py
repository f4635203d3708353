"""What a network answers: calibration, confusion, mistakes, and labels that it doubts."""
