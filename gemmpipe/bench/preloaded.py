"""The common imports of a run's processes, loaded once in the forkserver."""

import atexit
import os
from contextlib import suppress

import torch  # noqa: F401

import gemmpipe.bench.worker  # noqa: F401

with suppress(Exception):  # absent or broken: its users raise an error, and a CPU does not need it
    import triton  # noqa: F401

# The forkserver has nothing to save: a pipe that it inherited (`gemmpipe | tee`) need not wait until torch is taken
# apart. Its children do not run this: they end by `os._exit` themselves.
atexit.register(os._exit, 0)
