"""Tuned tables on disk: reading, merging, uniting, and import from other programs."""
