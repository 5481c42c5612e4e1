"""Kernels that do nothing: for the cost of a launch within a graph, and for what a launch itself changes."""

import triton
from triton.language.extra.cuda import gdc_wait


@triton.jit  # type: ignore[untyped-decorator]
def empty() -> None:
    """Does nothing."""
    return


@triton.jit  # type: ignore[untyped-decorator]
def dependent() -> None:
    """Waits for the end of the kernel before it (programmatic dependent launch).

    Without the wait this kernel could end before that one, and what comes next, which waits for this one alone, could
    read what that one has not written yet.
    """
    gdc_wait()
