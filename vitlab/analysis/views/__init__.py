"""Features and tokens as pictures."""
