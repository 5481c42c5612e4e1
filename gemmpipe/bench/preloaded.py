"""What the processes of a run have in common, imported once where they are forked from."""

from contextlib import suppress

import gemmpipe.bench.worker  # noqa: F401

with suppress(Exception):  # absent or broken: whoever needs it says so, and a CPU does not
    import triton  # noqa: F401
