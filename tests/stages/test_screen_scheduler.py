"""The scheduler hears what was left in the pool by a batch before it."""

from types import SimpleNamespace
from typing import Any, cast

from gemmpipe.core.data import Build, BuildFacts
from gemmpipe.executors import BuildResult
from gemmpipe.stages.screen.scheduler import Scheduler


def test_a_build_that_a_late_batch_left_behind_is_kept_and_nobodys_news() -> None:
    """Searches that ran out of time leave builds queued; the next batch has a scheduler that never asked for them."""
    known: list[str] = []
    noted = SimpleNamespace(
        build=lambda name, facts: known.append(name), add_build_facts=lambda name, facts: known.append(name)
    )
    context = SimpleNamespace(pool=None, time_account=None, journal=noted)
    scheduler = Scheduler(cast(Any, context), cast(Any, noted), cast(Any, None), cast(Any, None))
    build = Build(kernel="k:1", source_hash="", signature=(), constants=(), aligned=(), options=())
    facts = BuildFacts(compile_s=1.0, shared_bytes=None, registers=None, spills=None)
    scheduler.receive(BuildResult(build=build, facts=facts))
    assert known == [build.id, build.id], "the journal and the searches hear of it"
