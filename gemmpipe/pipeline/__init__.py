"""A composed configuration as objects, and a run of its chain of stages."""
