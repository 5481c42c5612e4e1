"""Timing: the clock, operand sets, the jobs that screen and time finalists, and the worker process that runs them."""
