"""The common imports of a run's processes, loaded once in the forkserver."""

from contextlib import suppress

import gemmpipe.bench.worker  # noqa: F401

with suppress(Exception):  # absent or broken: its users raise an error, and a CPU does not need it
    import triton  # noqa: F401
