"""Training: what is built for it, how it goes, how it ends."""
