"""Which patches an output depends on, and how far such a map can be believed."""
