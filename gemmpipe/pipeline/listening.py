"""The listeners of a run: started before its first stage, and notified of its outcome whatever ends it."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from gemmpipe.core.events import Events
from gemmpipe.core.paths import REPORT
from gemmpipe.listeners import Guarded, Listener, RunOutcome, RunStart, failed
from gemmpipe.pipeline.plan import Plan


@dataclass(kw_only=True)
class Attached:
    """The listeners of one run; `exit_code` is set by the block that runs it."""

    exit_code: int | None = None


@contextmanager
def listening(
    plan: Plan, events: Events, options: Mapping[str, str], output: Listener | None = None
) -> Iterator[Attached]:
    """Attach the plan's listeners for the block, and `output`, the stream that replaces the terminal, if any.

    Raises UserError before the block for a listener without its package. In the block, and after it, failures of a
    listener are warnings.
    """
    for listener in plan.listeners.values():
        listener.require()
    guarded = [Guarded(name, listener, events) for name, listener in plan.listeners.items()]
    followers = [*guarded, *([] if output is None else [Guarded("json", output, events)])]
    begun = run_start(plan, options)
    for follower in followers:
        follower.start(begun)
    events.listeners += guarded
    attached = Attached()
    try:
        yield attached
    except BaseException as error:
        for follower in followers:
            follower.finish(failed(error))
        raise
    if followers:
        outcome = _outcome(plan, attached.exit_code)
        for follower in followers:
            follower.finish(outcome)


def run_start(plan: Plan, options: Mapping[str, str]) -> RunStart:
    """The facts of a plan for listeners; `options` by group."""
    return RunStart(
        pipeline=plan.pipeline,
        folder=plan.run_dir,
        command=shlex.join(["gemmpipe", plan.pipeline, *plan.overrides]),
        kernel=plan.family.name,
        options=options,
        chain=plan.chain,
    )


def _outcome(plan: Plan, exit_code: int | None) -> RunOutcome:
    from gemmpipe.listeners.outcome import outcome_of

    report = plan.run_dir / REPORT
    try:
        outcome = outcome_of(plan.run_dir, plan.family, plan.rooflines, exit_code or 0)
        return replace(outcome, report=report if plan.report and report.is_file() else None)
    except Exception as error:  # noqa: BLE001 (the run has ended well; what listeners miss of it is in the error)
        return failed(error)
