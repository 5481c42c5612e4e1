"""The progress of the finals: a problem is done once, when each of its finalists has a trial."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from stage_contexts import stage_context

from gemmpipe import journal
from gemmpipe.bench.finals import FinalsJob
from gemmpipe.bench.jobs import Job
from gemmpipe.bench.screening import ScreenJob
from gemmpipe.bench.timer import Timer
from gemmpipe.core.data import Candidate, Device, Problem, Status, Trial
from gemmpipe.executors import JobResult
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.journal import Journal
from gemmpipe.search import TrialRequest
from gemmpipe.stages import Context
from gemmpipe.stages.bench import _FinalsProgress

TIMER = Timer(warmup=0, iters=1, rounds=3, budget_ms=1)
PROBLEM = Problem(family="f", key=(("M", 1), ("N", 2), ("K", 3)))
A, B, C = (Candidate.of("triton", {"n": i}) for i in range(3))
JOB = FinalsJob(
    stage="bench",
    problem=PROBLEM,
    finalists=(A, B, C),
    library=frozenset(),
    always_timed=frozenset(),
    timer=TIMER,
    err_ratio=0.05,
)


@pytest.fixture
def context(tmp_path: Path, blockscale: Family, no_words: KernelDefaults, h200: Device) -> Context:
    return stage_context(tmp_path, blockscale, no_words, h200)


def _trial(candidate: Candidate, launches: int = 3) -> Trial:
    status = Status.OK if launches else Status.INCORRECT
    return Trial(
        stage="bench",
        problem=PROBLEM.id,
        candidate=candidate,
        status=status,
        launches=launches,
        samples_us=(5.0,) * launches,
    )


def _done(context: Context) -> int:
    lines = context.journal.path.read_text().splitlines()
    return sum(json.loads(line)["row"] == "done" for line in lines)


def _finished(job: Job, *trials: Trial, complete: bool = True) -> JobResult:
    return JobResult(job=job, trials=trials, complete=complete)


def test_a_job_that_was_split_up_is_one_problem(context: Context) -> None:
    progress = _FinalsProgress(context)
    assert progress.start(JOB) == JOB
    progress.receive(_finished(JOB, replace(JOB.failed_trial(B, Status.DIED, "x")), complete=False))
    progress.receive(_finished(JOB.without({A, B}), _trial(C)))
    assert list(progress.pending) == [PROBLEM.id]
    assert _done(context) == 0
    progress.receive(_finished(JOB.without({B, C}), _trial(A)))
    assert not progress.pending
    assert _done(context) == 1
    progress.receive(_finished(JOB, _trial(A)))
    assert [t.candidate for t in progress.trials] == [B, C, A], "late results are ignored"
    assert _done(context) == 1


def test_a_finalist_without_a_result_gets_a_failed_trial(context: Context) -> None:
    progress = _FinalsProgress(context)
    progress.start(JOB)
    progress.receive(_finished(JOB, _trial(A), _trial(B)))
    assert [(t.candidate, t.status) for t in progress.trials][2:] == [(C, Status.DIED)]
    assert _done(context) == 1


def test_late_trials_of_screen_are_ignored(context: Context) -> None:
    progress = _FinalsProgress(context)
    progress.start(JOB)
    screen = ScreenJob(stage="screen", problem=PROBLEM, requests=(TrialRequest(candidate=A, launches=1),), timer=TIMER)
    progress.receive(_finished(screen, replace(_trial(A), stage="screen")))
    assert progress.pending == {PROBLEM.id: {A, B, C}}
    assert progress.trials == []


def test_a_problem_without_finalists_is_done(context: Context) -> None:
    progress = _FinalsProgress(context)
    assert progress.start(JOB.without({A, B, C})) is None
    assert not progress.pending
    assert _done(context) == 1


@pytest.mark.parametrize(
    ("known", "left"),
    [
        ([], (A, B, C)),
        ([_trial(B, 0)], (A, C)),
        ([_trial(A), _trial(B, 0)], (A, C)),
        ([_trial(A), _trial(B, 0), _trial(C)], ()),
    ],
    ids=["nothing", "a failure is kept", "an incomplete set of times is not", "all but the done row"],
)
def test_trials_of_an_earlier_session(context: Context, known: list[Trial], left: tuple[Candidate, ...]) -> None:
    for trial in known:
        context.record.add(trial)
    progress = _FinalsProgress(context)
    rest = progress.start(JOB)
    assert (rest.candidates if rest else ()) == left
    assert {t.candidate for t in progress.trials} == {A, B, C} - set(left)
    assert _done(context) == (not left)


def test_finals_that_were_done_are_read_back(context: Context, tmp_path: Path) -> None:
    earlier = Journal(tmp_path / "earlier")
    for trial in (_trial(A), _trial(B, 0), _trial(C, 5)):
        earlier.trial(trial)
    earlier.write("done", stage="bench", problem=PROBLEM.id)
    earlier.close()
    progress = _FinalsProgress(replace(context, record=journal.read(tmp_path / "earlier")))
    assert progress.start(JOB) is None
    assert progress.trials == [_trial(A), _trial(B, 0), _trial(C, 5)]
    assert _done(context) == 0, "the row is in the journal already"
