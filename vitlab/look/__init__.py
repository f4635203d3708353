"""Pages to look at: a run, several runs, a network from elsewhere; each is one file that works offline."""
