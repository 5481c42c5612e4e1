"""The scheduler takes builds that a batch before it left in the pool."""

from types import SimpleNamespace
from typing import Any, cast

from gemmpipe.bench.screening import ScreenJob
from gemmpipe.core.data import Build, BuildFacts
from gemmpipe.executors import BuildResult, BuildsAhead
from gemmpipe.stages.screen.scheduler import Scheduler

BUILD = Build(kernel="k:1", source_hash="", signature=(), constants=(), aligned=(), options=())
MESSAGE = BuildResult(build=BUILD, facts=BuildFacts(compile_s=1.0, shared_bytes=None, registers=None, spills=None))


def _scheduler(recorded: list[str], ahead: BuildsAhead) -> Scheduler:
    """A scheduler that notes what it tells the journal and the searches."""
    journal = SimpleNamespace(build=lambda name, facts: recorded.append(f"journal {name}"))
    searches = SimpleNamespace(add_build_facts=lambda name, facts: recorded.append(f"searches {name}"))
    context = SimpleNamespace(pool=None, time_account=None, journal=journal, builds_ahead=ahead)
    return Scheduler(cast(Any, context), cast(Any, searches), cast(Any, None), cast(Any, None), cast(Any, None))


def test_a_build_of_an_earlier_batch_is_recorded() -> None:
    """Searches that ran out of time leave builds queued; the scheduler of the next batch has not requested them."""
    recorded: list[str] = []
    _scheduler(recorded, BuildsAhead()).receive(MESSAGE)
    assert sorted(recorded) == [f"journal {BUILD.id}", f"searches {BUILD.id}"]


def test_a_build_for_the_finals_is_that_of_a_search_too_if_one_waits_for_it() -> None:
    finished: list[str] = []
    for waits in (False, True):
        recorded: list[str] = []
        ahead = BuildsAhead()
        ahead.add([BUILD])
        ahead.send(cast(Any, SimpleNamespace(compile=lambda build: None, open_builds=0, compile_slots=1)), 1.0)
        scheduler = _scheduler(recorded, ahead)
        if waits:
            state = SimpleNamespace(build_finished=lambda name, error: finished.append(name) or [])
            scheduler._waiting[BUILD.id] = {"p": cast(Any, state)}
        scheduler.receive(MESSAGE)
        assert ahead.errors == {BUILD.id: ""}
        assert f"journal {BUILD.id}" in recorded
        assert (f"searches {BUILD.id}" in recorded) == waits
    assert finished == [BUILD.id]


def test_a_job_that_begins_at_once_is_what_runs_now() -> None:
    """A job on a CPU can take many seconds, in which the last result is of another problem."""
    sent: list[ScreenJob] = []
    pool = SimpleNamespace(submit=lambda job, worker: sent.append(job), backlog=lambda worker: len(sent))
    journal = SimpleNamespace(launch=lambda stage, problem, candidates: None)
    family = SimpleNamespace(baseline=())
    context = SimpleNamespace(pool=pool, time_account=None, journal=journal, builds_ahead=BuildsAhead(), family=family)
    scheduler = Scheduler(cast(Any, context), cast(Any, None), cast(Any, None), cast(Any, None), cast(Any, None))
    first, second = (cast(Any, SimpleNamespace(problem=SimpleNamespace(id=name))) for name in "ab")
    scheduler._next_requests = lambda state: cast(Any, [SimpleNamespace(candidate="c")])  # type: ignore[method-assign]
    assert scheduler._submit_batch(first, 0)
    assert scheduler._submit_batch(second, 0)
    assert [job.problem.id for job in sent] == ["a", "b"]
    assert scheduler.running_now is first
