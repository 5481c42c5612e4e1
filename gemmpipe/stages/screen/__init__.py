"""Enumerating, compiling and screening candidates, and the shortlist for the finals."""
