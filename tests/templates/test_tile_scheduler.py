"""The places of tiles: the device's functions as Python, as Gluon has no interpreter."""

import inspect
import operator
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gemmpipe.templates.hopper import tile_scheduler


def _as_python(*names: str) -> dict[str, Callable[..., Any]]:
    """The functions of tile_scheduler with Python's numbers; its quotients are exact (test_hopper.py)."""
    names_seen: dict[str, Any] = {
        "gl": SimpleNamespace(minimum=min, maximum=max, constexpr=int),
        "fast_div": operator.floordiv,
    }
    for name in names:
        source = textwrap.dedent(inspect.getsource(getattr(tile_scheduler, name).fn))
        exec(source.removeprefix("@gluon.jit\n"), names_seen)
    return names_seen


@pytest.mark.parametrize("block_m", [64, 128, 256])
def test_branches_change_no_tile_s_place(block_m: int) -> None:
    """As each role finds its tiles by itself, by either function, a difference would be a wrong result."""
    found = _as_python("swizzled_tile", "branching_swizzled_tile")
    for m in (1, 3, 64, 65, 127, 128, 130, 200, 256, 257, 511, 512, 1000, 1023, 1024, 4095, 4096):
        tiles_m = -(-m // block_m)
        for tiles_n in (1, 3, 11):
            for group_m in (1, 2, 8, 16):
                arguments = m, tiles_m, tiles_n, group_m, block_m
                places = [found["branching_swizzled_tile"](t, *arguments) for t in range(tiles_m * tiles_n)]
                assert places == [found["swizzled_tile"](t, *arguments) for t in range(tiles_m * tiles_n)]
                assert len(set(places)) == tiles_m * tiles_n
                assert {column for _, column in places} == set(range(tiles_n))
