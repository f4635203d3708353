"""Shards of photos: packed once, read without decoding."""
