"""Training: build the job, run it, close it."""
