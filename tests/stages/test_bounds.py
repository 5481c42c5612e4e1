"""Bounds: times at a smaller M as lower bounds at a larger one."""

from gemmpipe.core.data import Candidate, Problem, Status, Trial
from gemmpipe.stages.screen.state import Bounds

A, B = Candidate.of("torch", {"n": 0}), Candidate.of("torch", {"n": 1})
KERNEL = Candidate.of("triton", {"n": 0})


def _problem(m: int) -> Problem:
    return Problem(family="f", key=(("M", m), ("N", 2), ("K", 3)))


def _trial(m: int, candidate: Candidate, us: float, extra: int = 0) -> Trial:
    return Trial(
        stage="screen",
        problem=_problem(m).id,
        candidate=candidate,
        status=Status.OK,
        launches=1,
        samples_us=(us,),
        extra_weight_bytes=extra,
    )


def _bounds(*trials: tuple[int, Trial]) -> Bounds:
    bounds = Bounds(("torch",), {"triton"})
    for m, trial in trials:
        bounds.learn(_problem(m), trial)
    return bounds


def test_a_candidate_is_no_faster_with_more_rows() -> None:
    bounds = _bounds((8, _trial(8, A, 9000)), (32, _trial(32, A, 20_000)), (8, _trial(8, B, 10)))
    assert [bounds.bound_us(_problem(m), A) for m in (4, 8, 16, 32, 64)] == [0, 9000, 9000, 20_000, 20_000]
    assert bounds.is_long(_problem(16), A)
    assert not bounds.is_long(_problem(16), B)
    assert bounds.exempt(_problem(16), [A, B]) == B


def test_a_candidate_that_cannot_win_is_pruned() -> None:
    bounds = _bounds((8, _trial(8, A, 90_000)))
    pruned = bounds.prune(_problem(16), A, [_trial(16, B, 10_000)])
    assert pruned is not None
    assert pruned.status is Status.PRUNED
    assert pruned.time_us is None
    assert bounds.prune(_problem(16), A, [_trial(16, B, 70_000)]) is None
    assert bounds.prune(_problem(16), A, [_trial(16, B, 10_000, extra=5)]) is None, "it costs memory"
    assert bounds.prune(_problem(16), A, []) is None


def test_times_of_unchecked_kernels_prune_nothing() -> None:
    """A kernel that computes nothing is the fastest of all."""
    bounds = _bounds((8, _trial(8, A, 90_000)))
    assert bounds.prune(_problem(16), A, [_trial(16, KERNEL, 0.1)]) is None
