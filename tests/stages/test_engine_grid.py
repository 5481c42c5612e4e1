"""The grid of Ms at which an engine's function is timed, and the key that serves an M."""

from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.formats.engine_json import nearest_key
from gemmpipe.stages.engine.choice import key_grid, serving_keys

MS = st.sets(st.integers(1, 8192), min_size=1, max_size=12)
SOME = st.sets(st.integers(1, 8192), max_size=12)


@given(st.lists(st.integers(1, 9000), min_size=1, unique=True), st.integers(1, 9000))
def test_the_nearest_key_is_the_engines(keys: list[int], m: int) -> None:
    configs = {key: {"of": key} for key in keys}  # as both engines do, over the file's keys in its order
    assert nearest_key(keys, m) == configs[min(configs.keys(), key=lambda x: abs(x - m))]["of"]


def test_of_two_equally_near_keys_the_first_in_the_file_is_taken() -> None:
    assert nearest_key([2, 4], 3) == 2
    assert nearest_key([4, 2], 3) == 4


def test_means_of_keys_and_points_beyond_them() -> None:
    grid = key_grid([64, 16, 128], (), ())
    assert grid.keys == (16, 64, 128)
    assert grid.extra == (1, 32, 91, 256)
    assert (grid.copied, grid.existing) == ((), ())
    assert grid.adjacent(91) == (64, 128)
    assert grid.adjacent(256) == (128,)


def test_published_keys_within_are_timed_and_those_beyond_are_kept() -> None:
    grid = key_grid([64, 256], [1, 32, 96, 512, 4096], ())
    assert 96 in grid.extra
    assert grid.copied == (1, 32, 512, 4096)
    assert 2 * 256 not in grid.extra, "the published file serves these"
    assert 1 not in grid.extra


def test_keys_of_the_output_are_left_alone() -> None:
    grid = key_grid([64, 256], (), [91, 128, 1024])
    assert grid.existing == (91, 128, 1024)
    assert 128 not in grid.extra, "the mean is a key that stays"
    assert 512 in grid.extra, "nearer to 256 than to 1024"
    assert key_grid([64], [1024], [1024]).copied == (), "the output has it"


@given(MS, SOME, SOME)
def test_every_timed_m_is_served_by_a_tuned_key(ms: set[int], published: set[int], standing: set[int]) -> None:
    grid = key_grid(ms, published, standing)
    assert set(grid.keys) == ms
    assert not set(grid.extra) & ms
    assert set(serving_keys(grid, grid.keys).values()) <= ms
    assert published - ms <= {*grid.extra, *grid.copied, *grid.existing} | _elsewhere(grid, published)


def _elsewhere(grid: object, published: set[int]) -> set[int]:
    """Published keys that another key than a tuned one serves."""
    return {m for m in published if grid.nearest(m) not in grid.keys}  # type: ignore[attr-defined]
