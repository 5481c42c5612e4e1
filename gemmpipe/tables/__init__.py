"""Tuned tables on disk: read, merged, united, and taken over from other programs."""
