"""At which Ms an engine's function is timed, and which key serves an M."""

from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.formats.engine_json import nearest_key
from gemmpipe.stages.engine_grid import grid_of, served

MS = st.sets(st.integers(1, 8192), min_size=1, max_size=12)
SOME = st.sets(st.integers(1, 8192), max_size=12)


@given(st.lists(st.integers(1, 9000), min_size=1, unique=True), st.integers(1, 9000))
def test_the_nearest_key_is_the_engines(keys: list[int], m: int) -> None:
    configs = {key: {"of": key} for key in keys}  # what both engines say, over the file's keys in its order
    assert nearest_key(keys, m) == configs[min(configs.keys(), key=lambda x: abs(x - m))]["of"]


def test_of_two_as_near_the_first_in_the_file_is_taken() -> None:
    assert nearest_key([2, 4], 3) == 2
    assert nearest_key([4, 2], 3) == 4


def test_middles_and_what_lies_beyond() -> None:
    grid = grid_of([64, 16, 128], (), ())
    assert grid.keys == (16, 64, 128)
    assert grid.further == (1, 32, 91, 256)
    assert (grid.carried, grid.standing) == ((), ())
    assert grid.beside(91) == (64, 128)
    assert grid.beside(256) == (128,)


def test_published_keys_within_are_timed_and_those_beyond_are_kept() -> None:
    grid = grid_of([64, 256], [1, 32, 96, 512, 4096], ())
    assert 96 in grid.further
    assert grid.carried == (1, 32, 512, 4096)
    assert 2 * 256 not in grid.further, "the published file serves these"
    assert 1 not in grid.further


def test_what_the_output_holds_already_is_left_to_it() -> None:
    grid = grid_of([64, 256], (), [91, 128, 1024])
    assert grid.standing == (91, 128, 1024)
    assert 128 not in grid.further, "the middle is a key that stays"
    assert 512 in grid.further, "nearer to 256 than to 1024"
    assert grid_of([64], [1024], [1024]).carried == (), "the output has it"


@given(MS, SOME, SOME)
def test_every_timed_m_is_served_by_a_tuned_key(ms: set[int], published: set[int], standing: set[int]) -> None:
    grid = grid_of(ms, published, standing)
    assert set(grid.keys) == ms
    assert not set(grid.further) & ms
    assert set(served(grid, grid.keys).values()) <= ms
    assert published - ms <= {*grid.further, *grid.carried, *grid.standing} | _elsewhere(grid, published)


def _elsewhere(grid: object, published: set[int]) -> set[int]:
    """Published keys within that a key of the output is nearer to."""
    return {m for m in published if grid.nearest(m) not in grid.keys}  # type: ignore[attr-defined]
