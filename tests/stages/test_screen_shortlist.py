"""The shortlist for the finals."""

from gemmpipe.core.data import Candidate, Status, Trial
from gemmpipe.stages.screen.shortlist import shortlist


def _trial(backend: str, number: int, time_us: float, *, requested: int = 12, extra: int = 0) -> Trial:
    return Trial(
        stage="screen",
        problem="p",
        candidate=Candidate.of(backend, {"NUMBER": number}),
        status=Status.OK,
        launches=1,
        requested_launches=requested,
        samples_us=(time_us,),
        extra_weight_bytes=extra,
    )


def _kept(*trials: Trial, library: tuple[str, ...] = ("library",)) -> list[float]:
    kept = shortlist({t.candidate: t for t in trials}, keep=5, margin_pct=6, library=library)
    times = {t.candidate: t.time_us for t in trials}
    return [times[c] or 0.0 for c in kept]


def test_the_fastest_within_a_margin_of_the_fourth_are_kept() -> None:
    own = [_trial("own", i, 10.0 + i / 10) for i in range(8)] + [_trial("own", 8, 30.0)]
    assert _kept(*own) == [10.0, 10.1, 10.2, 10.3, 10.4]
    wide = [_trial("own", i, time_us) for i, time_us in enumerate((1.0, 10.0, 10.1, 10.2, 10.8, 10.9))]
    assert _kept(*wide) == [1.0, 10.0, 10.1, 10.2, 10.8], "nothing is checked yet: the first may compute nothing"


def test_what_runs_without_a_row_and_incumbents_are_kept_however_slow() -> None:
    trials = {t.candidate: t for t in [_trial("own", i, 10.0 + 10 * i) for i in range(8)]}
    slow = _trial("own", 7, 80.0).candidate
    assert slow not in shortlist(trials, keep=2, margin_pct=6)
    assert slow in shortlist(trials, keep=2, margin_pct=6, always=(slow, Candidate.of("own", {"NUMBER": 99})))


def test_of_those_slower_than_a_library_only_the_best_of_each_backend_is_kept() -> None:
    own = [_trial("own", i, 10.0 + i / 10) for i in range(8)]
    assert _kept(*own, _trial("library", 0, 6.0)) == [6.0, 10.0]
    assert len(_kept(*own, _trial("library", 0, 6.0), library=())) == 5
    assert len(_kept(*own, _trial("library", 0, 6.0, extra=1))) == 5, "a path with extra memory is no reference"
    assert _kept(*own, _trial("library", 0, 9.6)) == [9.6, 10.0, 10.1]


def test_more_requested_launches_come_first() -> None:
    short = [_trial("own", i, 9.0, requested=3) for i in range(5)]
    long = [_trial("own", 10 + i, 10.0) for i in range(5)]
    assert _kept(*short, *long) == [10.0] * 5


def test_a_long_launch_far_behind_a_library_with_no_more_memory_does_not_enter_the_finals() -> None:
    """On a CPU: each finalist is launched for seconds again."""

    def kept(slow_us: float, extra: int) -> set[str]:
        trials = [
            Trial(
                stage="screen",
                problem="p",
                candidate=Candidate.of(backend, {"method": method}),
                status=Status.OK,
                launches=1,
                samples_us=(us,),
                extra_weight_bytes=bytes_,
            )
            for backend, method, us, bytes_ in (
                ("torch", "convert", 90_000.0, 0),
                ("onednn", "packed", slow_us / 3, 100),
                ("torch", "copy", slow_us, extra),
            )
        ]
        results = {trial.candidate: trial for trial in trials}
        return {str(c.knobs["method"]) for c in shortlist(results, keep=1, margin_pct=6, library=("torch", "onednn"))}

    assert kept(60_000.0, 200) == {"convert", "packed"}
    assert kept(60_000.0, 50) == {"convert", "packed", "copy"}, "it needs less memory than the faster one"
    assert kept(6_000.0, 200) == {"convert", "packed", "copy"}, "a short launch may have been disturbed"
