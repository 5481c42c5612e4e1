"""The choice of an engine's configurations: no timed M gets slower than with the engine's current one."""

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from gemmpipe.bench.timer import paired_ratio
from gemmpipe.core.data import Candidate
from gemmpipe.formats.engine_json import nearest_key
from gemmpipe.stages.engine.choice import ExtraKeys, KeyGrid, TimedPoint, choose_entries, key_grid
from gemmpipe.stages.selection_rules import Finalist

ROUNDS = 12


def _candidate(name: int) -> Candidate:
    return Candidate.of("vllm", {"n": name})


def _finalist(name: int, us: float, noise: float = 0.0) -> Finalist:
    samples = tuple(us * (1 + noise * (i % 3 - 1)) for i in range(ROUNDS))
    return Finalist(
        candidate=_candidate(name), samples_us=samples, extra_weight_bytes=0, err_ratio=0.0, kernel_name="k"
    )


def _point(m: int, times: Mapping[int, float], taken: int = 0) -> TimedPoint:
    these = tuple(_finalist(name, us) for name, us in times.items())
    return TimedPoint(m=m, finalists=these, current=(_candidate(taken),))


def _keys(grid: KeyGrid, points: list[TimedPoint]) -> dict[int, int]:
    entries = choose_entries(grid, {p.m: p for p in points}, ExtraKeys(pct=2.0))
    return {e.m: int(str(e.candidate.knobs["n"])) for e in entries}


GRID = KeyGrid(keys=(64, 128), extra=(91,), copied=(), existing=())


def test_one_configuration_for_a_key_and_the_ms_that_it_serves() -> None:
    points = [_point(64, {0: 9, 1: 5.0, 2: 5.05}), _point(91, {0: 9, 1: 8.0, 2: 6}), _point(128, {0: 9, 3: 7})]
    assert _keys(GRID, points) == {64: 2, 128: 3}, "1 is ahead by 1 % at 64, and behind by a third at 91"


def test_an_m_between_keys_with_another_best_gets_a_key() -> None:
    points = [_point(64, {0: 9, 1: 5}), _point(91, {0: 9, 1: 12, 3: 6}), _point(128, {0: 9, 3: 7})]
    assert _keys(GRID, points) == {64: 1, 91: 3, 128: 3}


def test_large_ms_get_a_key_for_any_difference() -> None:
    grid = KeyGrid(keys=(3072, 4096), extra=(3547,), copied=(), existing=())
    points = [_point(3072, {0: 9, 1: 5.0}), _point(3547, {0: 9, 1: 6.1, 2: 6.0, 3: 7}), _point(4096, {0: 9, 3: 7})]
    by_m = {p.m: p for p in points}

    def keys(extra: ExtraKeys) -> dict[int, int]:
        return {e.m: int(str(e.candidate.knobs["n"])) for e in choose_entries(grid, by_m, extra)}

    assert keys(ExtraKeys(pct=2.0)) == {3072: 1, 4096: 3}, "1.6 % slower at 3547"
    assert keys(ExtraKeys(pct=2.0, exact_from=1024)) == {3072: 1, 3547: 2, 4096: 3}
    assert keys(ExtraKeys(pct=2.0, exact_from=4000)) == {3072: 1, 4096: 3}


def test_a_key_that_would_change_nothing_is_left_out() -> None:
    grid = KeyGrid(keys=(16, 256), extra=(1, 64), copied=(), existing=())
    points = [_point(1, {0: 9, 1: 5, 2: 6}), _point(16, {0: 9, 1: 5, 2: 6}), _point(64, {0: 9, 1: 6, 2: 5})]
    assert _keys(grid, [*points, _point(256, {0: 9, 2: 5})]) == {16: 1, 64: 2, 256: 2}


def test_the_current_configuration_stays_unless_another_is_faster() -> None:
    level = [_point(m, {0: 5.0, 1: 5.0}) for m in (64, 91, 128)]
    assert set(_keys(GRID, level).values()) == {0}
    noisy = TimedPoint(m=64, finalists=(_finalist(0, 5.0, 0.1), _finalist(1, 4.95)), current=(_candidate(0),))
    assert _keys(GRID, [noisy, *level[1:]])[64] == 0, "its interval includes 1"


def test_a_current_configuration_that_is_untimed_stays() -> None:
    held = TimedPoint(
        m=64, finalists=(_finalist(1, 5.0),), current=(_candidate(0),), untried=frozenset([_candidate(0)])
    )
    entries = choose_entries(
        GRID, {64: held, 91: _point(91, {0: 9, 1: 3}), 128: _point(128, {0: 9, 1: 3})}, ExtraKeys(pct=2.0)
    )
    assert [(e.m, e.candidate.knobs["n"], e.finalist is None) for e in entries] == [
        (64, 0, True),
        (91, 1, False),
        (128, 1, False),
    ]


def test_the_fastest_replaces_an_incorrect_current_configuration() -> None:
    points = [_point(m, {1: 5.0, 2: 4.0}) for m in (64, 91, 128)]
    assert _keys(GRID, points) == {64: 2, 128: 2}


def test_a_key_without_a_timed_candidate_is_left_out() -> None:
    empty = TimedPoint(m=128, finalists=(), current=(_candidate(0),))
    assert _keys(GRID, [_point(64, {0: 5}), _point(91, {0: 5}), empty]) == {64: 0}


@settings(max_examples=150)
@given(st.data())
def test_no_timed_m_gets_slower(data: st.DataObject) -> None:
    ms = data.draw(st.sets(st.integers(1, 300), min_size=1, max_size=5))
    published = data.draw(st.sets(st.integers(1, 300), max_size=4))
    grid = key_grid(ms, published, data.draw(st.sets(st.integers(1, 300), max_size=3)))
    points: dict[int, TimedPoint] = {}
    for m in grid.timed_ms:
        times = {0: data.draw(st.floats(2, 9))}
        times |= {n: data.draw(st.floats(1, 20)) for n in data.draw(st.sets(st.integers(1, 5), max_size=4))}
        points[m] = _point(m, times)
    chosen = {e.m: e.candidate for e in choose_entries(grid, points, ExtraKeys(pct=2.0))}
    assert set(grid.keys) <= chosen.keys() <= set(grid.timed_ms)
    for m, point in points.items():
        key = nearest_key(sorted({*chosen, *grid.copied, *grid.existing}), m)
        got = chosen.get(key)
        assert got is not None, "another key serves it"
        mine, before = point.of(got), point.of(_candidate(0))
        assert mine is not None
        assert before is not None
        assert paired_ratio(mine.samples_us, before.samples_us).median <= 1
