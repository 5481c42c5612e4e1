"""The scheduler takes builds that a batch before it left in the pool."""

from types import SimpleNamespace
from typing import Any, cast

from gemmpipe.core.data import Build, BuildFacts
from gemmpipe.executors import BuildResult
from gemmpipe.stages.screen.scheduler import Scheduler


def test_a_build_of_an_earlier_batch_is_recorded() -> None:
    """Searches that ran out of time leave builds queued; the scheduler of the next batch has not requested them."""
    recorded: list[str] = []
    recorder = SimpleNamespace(
        build=lambda name, facts: recorded.append(name), add_build_facts=lambda name, facts: recorded.append(name)
    )
    context = SimpleNamespace(pool=None, time_account=None, journal=recorder)
    scheduler = Scheduler(cast(Any, context), cast(Any, recorder), cast(Any, None), cast(Any, None), cast(Any, None))
    build = Build(kernel="k:1", source_hash="", signature=(), constants=(), aligned=(), options=())
    facts = BuildFacts(compile_s=1.0, shared_bytes=None, registers=None, spills=None)
    scheduler.receive(BuildResult(build=build, facts=facts))
    assert recorded == [build.id, build.id], "for the journal and for the searches"
