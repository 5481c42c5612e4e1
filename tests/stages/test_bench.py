"""The finals' book-keeping: a problem is done once, when each of its finalists has a trial."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from search_setup import EXHAUSTIVE

from gemmpipe import journal
from gemmpipe.bench.finals import FinalsJob
from gemmpipe.bench.jobs import Job
from gemmpipe.bench.screening import ScreenJob
from gemmpipe.bench.timer import Timer
from gemmpipe.core.data import Candidate, Device, Problem, Status, Trial
from gemmpipe.core.events import Events
from gemmpipe.executors import JobResult
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.family.space import Space
from gemmpipe.journal import Journal, Record
from gemmpipe.search import TrialRequest
from gemmpipe.sources.inline import InlineShapes
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
    return Context(
        family=blockscale,
        defaults=no_words,
        source=InlineShapes(items=[]),
        formats=(),
        output=tmp_path,
        device=h200,
        retune=False,
        events=Events(),
        run_id="r",
        run_dir=tmp_path / "run",
        provenance={},
        space=Space(axes={}, when=(), pinned=()),
        search=EXHAUSTIVE,
        implementations=(),
        incumbents={},
        policy="p",
        journal=Journal(tmp_path),
        record=Record(),
        pool_or_none=None,
        check=lambda: None,
    )


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
    tally = _FinalsProgress(context)
    assert tally.start(JOB) == JOB
    tally.receive(_finished(JOB, replace(JOB.failed_trial(B, Status.DIED, "x")), complete=False))
    tally.receive(_finished(JOB.without({A, B}), _trial(C)))
    assert list(tally.pending) == [PROBLEM.id]
    assert _done(context) == 0
    tally.receive(_finished(JOB.without({B, C}), _trial(A)))
    assert not tally.pending
    assert _done(context) == 1
    tally.receive(_finished(JOB, _trial(A)))
    assert [t.candidate for t in tally.trials] == [B, C, A], "late answers are no news"
    assert _done(context) == 1


def test_a_finalist_without_an_answer_is_no_secret(context: Context) -> None:
    tally = _FinalsProgress(context)
    tally.start(JOB)
    tally.receive(_finished(JOB, _trial(A), _trial(B)))
    assert [(t.candidate, t.status) for t in tally.trials][2:] == [(C, Status.DIED)]
    assert _done(context) == 1


def test_what_is_left_of_screen_is_not_the_finals(context: Context) -> None:
    tally = _FinalsProgress(context)
    tally.start(JOB)
    screen = ScreenJob(stage="screen", problem=PROBLEM, requests=(TrialRequest(candidate=A, launches=1),), timer=TIMER)
    tally.receive(_finished(screen, replace(_trial(A), stage="screen")))
    assert tally.pending == {PROBLEM.id: {A, B, C}}
    assert tally.trials == []


def test_a_problem_without_finalists_is_done(context: Context) -> None:
    tally = _FinalsProgress(context)
    assert tally.start(JOB.without({A, B, C})) is None
    assert not tally.pending
    assert _done(context) == 1


@pytest.mark.parametrize(
    ("known", "left"),
    [
        ([], (A, B, C)),
        ([_trial(B, 0)], (A, C)),
        ([_trial(A), _trial(B, 0)], (A, C)),
        ([_trial(A), _trial(B, 0), _trial(C)], ()),
    ],
    ids=["nothing", "a failure stands", "half the rounds do not", "all was written but the end"],
)
def test_what_an_earlier_session_left(context: Context, known: list[Trial], left: tuple[Candidate, ...]) -> None:
    for trial in known:
        context.record.add(trial)
    tally = _FinalsProgress(context)
    rest = tally.start(JOB)
    assert (rest.candidates if rest else ()) == left
    assert {t.candidate for t in tally.trials} == {A, B, C} - set(left)
    assert _done(context) == (not left)


def test_finals_that_were_done_are_read_back(context: Context, tmp_path: Path) -> None:
    earlier = Journal(tmp_path / "earlier")
    for trial in (_trial(A), _trial(B, 0), _trial(C, 5)):
        earlier.trial(trial)
    earlier.write("done", stage="bench", problem=PROBLEM.id)
    earlier.close()
    tally = _FinalsProgress(replace(context, record=journal.read(tmp_path / "earlier")))
    assert tally.start(JOB) is None
    assert tally.trials == [_trial(A), _trial(B, 0), _trial(C, 5)]
    assert _done(context) == 0, "it is written already"
