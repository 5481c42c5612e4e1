"""A kernel that does nothing: what a launch costs within a graph."""

import triton


@triton.jit  # type: ignore[untyped-decorator]
def empty() -> None:
    """Nothing."""
    return
