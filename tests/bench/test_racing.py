"""The rules of a race: elimination, the end of the race, and the baseline."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.bench.finals import FinalistRun, RacingRules
from gemmpipe.bench.timer import TimedReplay, paired_ratio
from gemmpipe.core.data import Candidate, median

SAMPLES = st.lists(st.floats(1.0, 1.2), min_size=10, max_size=30)


def _finalist(name: str, samples: list[float], *, extra_bytes: int = 0) -> FinalistRun:
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
    rng = random.Random(f"{time_us} {rounds} {seed}")
    return [time_us * rng.gauss(1, 0.002) for _ in range(rounds)]


def test_a_drop_of_clocks_during_the_race_eliminates_none() -> None:
    """The medians of two equal kernels differ if the drop comes one round earlier for one of them."""
    first, second = _finalist("a", [1.0] * 9 + [1.1] * 11), _finalist("b", [1.0] * 11 + [1.1] * 9)
    assert median(first.samples) / median(second.samples) > 1.03, "by medians it would be eliminated"
    assert _rules().still_racing([first, second]) == [first, second]
    first.samples[:] = [1.04 * time_us for time_us in second.samples]
    assert _rules().still_racing([first, second]) == [second]


@pytest.mark.parametrize(("rounds", "ratio", "stays"), [(1, 1.25, True), (1, 1.35, False), (5, 1.06, False)])
def test_the_allowed_ratio_decreases_with_the_rounds(rounds: int, ratio: float, stays: bool) -> None:
    quick, slow = _finalist("a", [5.0] * rounds), _finalist("b", [5.0 * ratio] * rounds)
    assert (slow in _rules().still_racing([quick, slow])) is stays
    assert slow.eliminated is not stays
    heavy = _finalist("c", [4.0] * rounds, extra_bytes=100)
    assert quick in _rules().still_racing([quick, heavy]), "a rival with more memory eliminates none"


@given(SAMPLES)
def test_a_race_is_decided_if_no_rival_can_be_faster(noise: list[float]) -> None:
    lead = [10.0 * x for x in noise]
    fastest = _finalist("fastest", lead)
    behind, same = _finalist("behind", [1.02 * x for x in lead]), _finalist("same", list(lead))
    assert _rules().decided([fastest])
    assert _rules().decided([fastest, behind, same]), "with any choice"
    assert not _rules(always_timed=(behind,)).decided([fastest, behind]), "always timed for all rounds"


@given(SAMPLES, SAMPLES)
def test_an_undecided_race_continues(first: list[float], second: list[float]) -> None:
    rounds = min(len(first), len(second))
    pair = [_finalist("a", first[:rounds]), _finalist("b", second[:rounds])]
    fastest, rival = sorted(pair, key=lambda r: (median(r.samples), r.candidate.id))
    ratio = paired_ratio(rival.samples, fastest.samples)
    assert _rules().decided(pair) is (ratio.low > 0.998 and ratio.noise_pct <= 2)


def test_a_finalist_with_more_memory_decides_nothing_for_the_others() -> None:
    """If no copy of weights is allowed, the choice is between the other two."""
    copied = _finalist("copied", [4.0, 4.01] * 5, extra_bytes=100)
    first, second = _finalist("first", [4.1, 4.2] * 5), _finalist("second", [4.2, 4.1] * 5)
    assert not _rules().decided([first, second])
    assert not _rules().decided([copied, first, second])
    assert _rules().decided([copied, first])


def test_nothing_is_decided_in_the_first_rounds() -> None:
    assert not _rules().decided([_finalist("a", [1.0] * 9), _finalist("b", [9.0] * 9)])


def test_a_slow_baseline_stops_after_ten_rounds() -> None:
    quick, library = _finalist("a", _around(5, 9)), _finalist("b", _around(50, 9))
    rules = _rules(library=(library,))
    assert rules.still_racing([quick, library]) == [quick, library]
    quick.samples, library.samples = _around(5, 10), _around(50, 10)
    assert rules.still_racing([quick, library]) == [quick]
    assert not library.eliminated, "it is compared for as many rounds as needed"
    noisy = _finalist("d", [50.0, 60.0] * 5)
    assert _rules(library=(noisy,)).still_racing([quick, noisy]) == [quick, noisy], "9 % of noise"
    near = _finalist("c", _around(5.3, 10))
    assert _rules(library=(near,)).still_racing([quick, near]) == [quick, near]
    assert _rules(library=(library,), always_timed=(library,)).still_racing([quick, library]) == [quick, library]


def test_of_two_layouts_the_slower_one_counts() -> None:
    finalist = _finalist("a", [])
    times = iter([5.0, 7.0, 9.0, 7.0, 5.0, 7.0])
    finalist.first_us, finalist.replays = (5.0, 7.0), (TimedReplay(lambda: next(times)),) * 2
    assert finalist.time_us == 7.0
    finalist.begin(first=False)
    finalist.run()
    assert finalist.samples == [7.0]
    finalist.run(), finalist.run()
    assert finalist.samples == [7.0, 7.0, 7.0], "a disturbed round does not change the layout"
    assert finalist.launches == 6
    finalist.begin(first=True)
    assert finalist.samples == [7.0]
