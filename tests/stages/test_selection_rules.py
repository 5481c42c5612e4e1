"""The chosen finalist: by paired rounds and by the rules, independent of the order."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmpipe.bench.timer import paired_ratio
from gemmpipe.core.data import Candidate, median
from gemmpipe.stages.selection_rules import Finalist, Selection, SelectionRules, rank, select_finalist

TIMES = st.floats(0.5, 1e6, allow_nan=False)
RULES = SelectionRules(prefer={"torch": 0.995}, min_improvement_pct=1.0, tie_pct=0.5)


def _finalist(backend: str, *samples_us: float, name: int = 0) -> Finalist:
    candidate = Candidate.of(backend, {"n": name})
    return Finalist(
        candidate=candidate, samples_us=samples_us, extra_weight_bytes=0, err_ratio=0.0, kernel_name=backend
    )


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=60))
def test_a_paired_ratio_is_ordered_and_inverts(pairs: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    forward, inverse = paired_ratio(a, b), paired_ratio(b, a)
    assert forward.low <= forward.median <= forward.high
    ratios = sorted(x / y for x, y in pairs)
    assert ratios[0] <= forward.low
    assert forward.high <= ratios[-1]
    assert math.isclose(forward.low * inverse.high, 1)
    if len(pairs) % 2:  # the mean of two middle ratios is not the inverse of that of the inverses
        assert math.isclose(forward.median * inverse.median, 1)
    assert forward.undecided == inverse.undecided or math.isclose(forward.low, 1) or math.isclose(forward.high, 1)


@given(st.lists(TIMES, min_size=1, max_size=40), st.floats(0.1, 10))
def test_a_slow_round_of_both_changes_no_ratio(samples: list[float], factor: float) -> None:
    ratio = paired_ratio([factor * s for s in samples], samples)
    assert math.isclose(ratio.low, factor)
    assert math.isclose(ratio.high, factor)


@given(st.lists(TIMES, min_size=1, max_size=40), st.lists(TIMES, min_size=1, max_size=40))
def test_only_common_rounds_count(a: list[float], b: list[float]) -> None:
    n = min(len(a), len(b))
    assert paired_ratio(a, b) == paired_ratio(a[:n], b[:n])


FINALISTS = st.lists(
    st.tuples(st.sampled_from(["triton", "torch", "skinny"]), st.lists(TIMES, min_size=1, max_size=20)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=200)
@given(FINALISTS, st.randoms(use_true_random=False), st.integers(-1, 5))
def test_the_choice_does_not_depend_on_the_order(
    rows: list[tuple[str, list[float]]], order: object, incumbent: int
) -> None:
    finalists = [_finalist(backend, *samples, name=i) for i, (backend, samples) in enumerate(rows)]
    known = [finalists[incumbent].candidate] if 0 <= incumbent < len(finalists) else []
    choices: list[Selection] = []
    for _ in range(4):
        order.shuffle(finalists)  # type: ignore[attr-defined]
        choices.append(select_finalist(finalists, ("torch",), known, RULES))
    assert all(choice == choices[0] for choice in choices)
    chosen = choices[0]
    assert chosen.chosen in finalists
    assert chosen.runner_up is not chosen.chosen
    ranked = rank(finalists)
    assert chosen.baseline == next((f for f in ranked if f.candidate.backend == "torch"), None)
    if chosen.reason == "":
        assert chosen.chosen == ranked[0]


def test_a_pruned_finalist_never_wins_by_times_of_early_rounds() -> None:
    """Clocks drop under load: the early rounds are faster for all."""
    winner = _finalist("triton", 10, 10, 10, 12, 12, 12, 12)
    outrun = replace(_finalist("triton", 11, 11, 11, name=1), complete=False)
    assert outrun.time_us < winner.time_us
    choice = select_finalist([outrun, winner], (), (), RULES)
    assert choice.chosen is winner
    assert choice.runner_up is outrun


def test_the_fastest_wins_and_the_id_decides_between_equals() -> None:
    fast, slow = _finalist("triton", 1, 1, 1), _finalist("triton", 2, 2, 2, name=1)
    assert select_finalist([slow, fast], (), (), RULES).chosen is fast
    twins = [_finalist("triton", 1, 1, 1, name=i) for i in range(5)]
    first = min(twins, key=lambda f: f.candidate.id)
    for some in itertools.permutations(twins):
        choice = select_finalist(some, (), (), RULES)
        assert choice.chosen is first
        assert choice.near_ties == 4


def test_other_backends_are_compared_by_their_fastest_finalist() -> None:
    chosen, near = _finalist("triton", 1, 2, 1), _finalist("deepgemm", 1.5, 2.5, 1.02)
    slow, twin = _finalist("deepgemm", 3, 3, 3, name=1), _finalist("triton", 1.1, 2.2, 1.1, name=2)
    choice = select_finalist([slow, near, twin, chosen], (), (), RULES)
    assert choice.chosen is chosen
    assert choice.backend_ratios == {"deepgemm": 1.25, "triton": pytest.approx(1.1)}


@pytest.mark.parametrize(("torch_us", "wins"), [(1.001, True), (1.004, True), (1.006, False)])
def test_a_preferred_library_needs_to_be_near_only(torch_us: float, wins: bool) -> None:
    triton, torch = _finalist("triton", *[1.0] * 9), _finalist("torch", *[torch_us] * 9)
    choice = select_finalist([triton, torch], ("torch",), (), RULES)
    assert (choice.chosen is torch) == wins
    assert choice.reason == ("torch is preferred within 0.995" if wins else "")


@pytest.mark.parametrize(
    ("new_us", "wins"),
    [([0.95] * 9, True), ([0.995] * 9, False), ([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1.5, 1.5, 1.5], False)],
    ids=["clearly faster", "by too little", "not surely"],
)
def test_an_incumbent_is_beaten_by_enough_and_surely(new_us: list[float], wins: bool) -> None:
    old, new = _finalist("triton", *[1.0] * 9), _finalist("triton", *new_us, name=1)
    choice = select_finalist([old, new], (), [old.candidate], RULES)
    assert (choice.chosen is new) == wins
    assert choice.incumbent is old
    assert choice.reason == ("" if wins else "the incumbent is not beaten by enough")


def test_a_choice_that_the_library_beats_in_the_rounds_of_both_is_none() -> None:
    """A busy CPU: ratios to a third finalist rank another one first than the rounds of these two."""
    third = _finalist("onednn", 11, 12, 9, 10, 9, name=2)
    new = _finalist("onednn", 13, 11, 8, 8, 13)
    torch = _finalist("torch", 12, 8, 12, 12, 9, name=1)
    assert rank([third, new, torch])[0] is new
    assert paired_ratio(new.samples_us, torch.samples_us).median > 1
    choice = select_finalist([third, new, torch], ("torch",), (), replace(RULES, prefer={}))
    assert choice.chosen is choice.baseline is torch
    assert choice.reason == "the library is faster in the rounds of both"


@pytest.mark.parametrize("preferred", ["onednn", "triton"])
def test_a_preferred_backend_stays_before_a_library_that_is_faster_in_the_rounds_of_both(preferred: str) -> None:
    third = _finalist("onednn", 11, 12, 9, 10, 9, name=2)
    new = _finalist("onednn", 13, 11, 8, 8, 13)
    torch = _finalist("torch", 12, 8, 12, 12, 9, name=1)
    choice = select_finalist([third, new, torch], ("torch",), (), replace(RULES, prefer={preferred: 0.001}))
    assert choice.chosen is (new if preferred == "onednn" else torch)


def test_a_finalist_of_several_times_the_median_is_not_first_by_its_rounds() -> None:
    """A busy CPU: the slower finalist is faster in five of nine rounds, because the other was interrupted in these."""
    quick = _finalist("onednn", 1, 1, 1, 1, 1.4, 9, 9, 9, 9)
    slow = _finalist("triton", 5, 5, 5, 5, 1.2, 5, 5, 5, 5)
    assert paired_ratio(slow.samples_us, quick.samples_us).median < 1
    for some in ([quick, slow], [slow, quick]):
        choice = select_finalist(some, (), (), replace(RULES, prefer={}))
        assert choice.chosen is quick
    # Where the medians agree within what noise explains, the rounds decide.
    near = _finalist("triton", 1.5, 1.5, 1.5, 1.5, 1.2, 5, 5, 5, 5)
    assert near.time_us > quick.time_us
    assert select_finalist([quick, near], (), (), replace(RULES, prefer={})).chosen is near


def test_an_incumbent_gives_way_to_a_library_that_is_surely_faster() -> None:
    old, torch = _finalist("triton", *[1.0] * 9), _finalist("torch", *[0.94] * 9)
    new = _finalist("triton", *[0.5] * 5, *[1.5] * 4, name=1)
    choice = select_finalist([old, torch, new], ("torch",), [old.candidate], replace(RULES, prefer={}))
    assert rank([old, torch, new])[0] is new
    assert choice.chosen is torch
    assert choice.reason == "the library is faster than the incumbent"


def test_median_of_samples() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5


def test_times_of_a_shared_device_lose_to_times_taken_alone() -> None:
    quick = replace(_finalist("triton", 1.0, 1.0, 1.0), shared=True)
    slow = _finalist("gluon", 5.0, 5.1, 5.0)
    assert select_finalist([quick, slow], ("torch",), (), RULES).chosen is slow
    assert select_finalist([quick], ("torch",), (), RULES).chosen is quick


def test_the_noise_is_half_of_the_interval() -> None:
    ratio = paired_ratio([1.0, 1.02, 0.98], [1.0, 1.0, 1.0])
    assert math.isclose(ratio.noise_pct, 2.0)
    alone = select_finalist([_finalist("triton", 1.0)], ("torch",), (), RULES)
    assert alone.noise_pct is None
    pair = select_finalist([_finalist("triton", 1.0, 1.0), _finalist("gluon", 2.0, 2.0, name=1)], ("torch",), (), RULES)
    assert pair.noise_pct == 0


def test_one_round_gives_no_noise() -> None:
    """A single round has no spread, which is unknown noise rather than none."""
    outrun = replace(_finalist("triton", 2.0, name=1), complete=False)
    assert select_finalist([_finalist("triton", 1.0, 1.1, 1.2), outrun], (), (), RULES).noise_pct is None
