"""The cells of an ablation, made: what each is, which is next, who trains it."""
