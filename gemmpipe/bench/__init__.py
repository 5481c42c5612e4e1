"""Timing: clocks, operand sets, the jobs that screen candidates and time finalists, and the worker process."""
