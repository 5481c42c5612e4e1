"""Work of a call, counted in lines of Python and calls of C functions: independent of the machine and its load."""

import sys
from collections.abc import Callable
from types import FrameType


def steps(call: Callable[[], object]) -> int:
    """Lines of Python that the call executes and C functions that it calls, on this thread."""
    count = 0

    def traced(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal count
        count += event == "line"
        return traced

    def profiled(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "c_call"

    tracing, profiling = sys.gettrace(), sys.getprofile()
    sys.settrace(traced)
    sys.setprofile(profiled)
    try:
        call()
    finally:
        sys.settrace(tracing)
        sys.setprofile(profiling)
    return count


def grows_linearly(prepare: Callable[[int], Callable[[], object]], size: int) -> None:
    """Asserts that twice the size takes at most 2.5 times the work; `prepare` returns the call for a size.

    A call of size 1 runs first, so that one-time work is not counted.
    """
    prepare(1)()
    once, twice = (steps(prepare(count)) for count in (size, 2 * size))
    assert once > size, "the counted call does not do the work"
    assert twice <= 2.5 * once, f"{size}: {once} steps, {2 * size}: {twice} steps"
