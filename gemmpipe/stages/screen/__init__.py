"""Enumerates, compiles and screens candidates, and makes the shortlist for the finals."""
