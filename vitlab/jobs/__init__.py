"""Operations on a run: train, evaluate, analyze, export, load."""
