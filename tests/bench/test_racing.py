"""Who is put out of a race, when it is over, and what is compared with to the end."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.bench.finals import FinalistRun, RacingRules
from gemmpipe.bench.timer import paired_ratio
from gemmpipe.core.data import Candidate, median

SAMPLES = st.lists(st.floats(1.0, 1.2), min_size=10, max_size=30)


def _runner(name: str, samples: list[float], *, extra_bytes: int = 0) -> FinalistRun:
    def never(index: int) -> None:
        raise AssertionError

    candidate = Candidate.of("faulty", {"NAME": name})
    return FinalistRun(
        candidate=candidate,
        position=0,
        err_ratio=0.0,
        first_us=(1.0,),
        binds=(never,),
        samples=samples,
        extra_bytes=extra_bytes,  # type: ignore[arg-type]
    )


def _rules(*, library: tuple[FinalistRun, ...] = (), always_timed: tuple[FinalistRun, ...] = ()) -> RacingRules:
    return RacingRules(
        library=frozenset(r.candidate.id for r in library), always_timed=frozenset(r.candidate.id for r in always_timed)
    )


def _around(time_us: float, rounds: int, seed: int = 0) -> list[float]:
    dice = random.Random(f"{time_us} {rounds} {seed}")
    return [time_us * dice.gauss(1, 0.002) for _ in range(rounds)]


def test_clocks_that_sag_in_the_middle_put_nobody_out() -> None:
    """One round apart, two medians of the same two speeds lie on either side."""
    first, second = _runner("a", [1.0] * 9 + [1.1] * 11), _runner("b", [1.0] * 11 + [1.1] * 9)
    assert median(first.samples) / median(second.samples) > 1.03, "by medians it would be put out"
    assert _rules().still_racing([first, second]) == [first, second]
    first.samples[:] = [1.04 * time_us for time_us in second.samples]
    assert _rules().still_racing([first, second]) == [second]


@pytest.mark.parametrize(("rounds", "ratio", "stays"), [(1, 1.25, True), (1, 1.35, False), (5, 1.06, False)])
def test_the_longer_the_race_the_less_one_may_be_behind(rounds: int, ratio: float, stays: bool) -> None:
    quick, slow = _runner("a", [5.0] * rounds), _runner("b", [5.0 * ratio] * rounds)
    assert (slow in _rules().still_racing([quick, slow])) is stays
    assert slow.eliminated is not stays
    heavy = _runner("c", [4.0] * rounds, extra_bytes=100)
    assert quick in _rules().still_racing([quick, heavy]), "memory that nobody may afford outruns nobody"


@given(SAMPLES)
def test_a_race_is_decided_where_no_rival_may_be_faster(noise: list[float]) -> None:
    lead = [10.0 * x for x in noise]
    fastest = _runner("fastest", lead)
    behind, same = _runner("behind", [1.02 * x for x in lead]), _runner("same", list(lead))
    assert _rules().decided([fastest])
    assert _rules().decided([fastest, behind, same]), "whoever it is"
    assert not _rules(always_timed=(behind,)).decided([fastest, behind]), "who is kept has all its rounds"


@given(SAMPLES, SAMPLES)
def test_a_race_that_may_go_either_way_goes_on(first: list[float], second: list[float]) -> None:
    rounds = min(len(first), len(second))
    pair = [_runner("a", first[:rounds]), _runner("b", second[:rounds])]
    fastest, rival = sorted(pair, key=lambda r: (median(r.samples), r.candidate.id))
    ratio = paired_ratio(rival.samples, fastest.samples)
    assert _rules().decided(pair) is (ratio.low > 0.998 and ratio.noise_pct <= 2)


def test_who_needs_more_memory_decides_nothing_for_those_who_need_none() -> None:
    """Where no copy may be kept, the choice is between the other two."""
    copied = _runner("copied", [4.0, 4.01] * 5, extra_bytes=100)
    first, second = _runner("first", [4.1, 4.2] * 5), _runner("second", [4.2, 4.1] * 5)
    assert not _rules().decided([first, second])
    assert not _rules().decided([copied, first, second])
    assert _rules().decided([copied, first])


def test_nothing_is_decided_in_the_first_rounds() -> None:
    assert not _rules().decided([_runner("a", [1.0] * 9), _runner("b", [9.0] * 9)])


def test_a_baseline_far_behind_rests_after_ten_rounds() -> None:
    quick, library = _runner("a", _around(5, 9)), _runner("b", _around(50, 9))
    rules = _rules(library=(library,))
    assert rules.still_racing([quick, library]) == [quick, library]
    quick.samples, library.samples = _around(5, 10), _around(50, 10)
    assert rules.still_racing([quick, library]) == [quick]
    assert not library.eliminated, "it was compared with as long as was needed"
    restless = _runner("d", [50.0, 60.0] * 5)
    assert _rules(library=(restless,)).still_racing([quick, restless]) == [quick, restless], "states 9 % of noise"
    near = _runner("c", _around(5.3, 10))
    assert _rules(library=(near,)).still_racing([quick, near]) == [quick, near]
    assert _rules(library=(library,), always_timed=(library,)).still_racing([quick, library]) == [quick, library]


def test_who_may_be_called_in_two_layouts_counts_by_the_slower_one() -> None:
    runner = _runner("a", [])
    times = iter([5.0, 7.0, 9.0, 7.0, 5.0, 7.0])
    runner.first_us, runner.replays = (5.0, 7.0), (lambda: next(times),) * 2
    assert runner.time_us == 7.0
    runner.begin(first=False)
    runner.run()
    assert runner.samples == [7.0]
    runner.run(), runner.run()
    assert runner.samples == [7.0, 7.0, 7.0], "a round in which something came in between changes no layout"
    assert runner.launches == 6
    runner.begin(first=True)
    assert runner.samples == [7.0]
