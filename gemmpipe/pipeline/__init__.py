"""Builds a plan from a composed configuration, and runs its chain of stages."""
