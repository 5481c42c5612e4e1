"""Calls of an engine's own functions: whether they can run here, and their kernels, which are compiled ahead."""

import time
from collections.abc import Sequence
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING

from gemmpipe.backends.engine import EngineImplementation
from gemmpipe.backends.engine_compile import CompileCalls
from gemmpipe.core.data import Candidate, Knobs
from gemmpipe.core.errors import one_line
from gemmpipe.core.events import IDLE
from gemmpipe.family import GemmSpec
from gemmpipe.stages import POLL_S, Context
from gemmpipe.stages.engine.expected import compile_processes, compile_seconds, compiled_share
from gemmpipe.stages.rows import candidate_of

if TYPE_CHECKING:
    import pandas as pd


def why_absent(implementation: EngineImplementation, context: Context) -> str | None:
    """The reason why the engine's function cannot run here; checked in another process if possible, as it imports."""
    submitted = context.pool.submit_task(partial(_absent, implementation))
    if submitted is None:
        return implementation.unavailable_reason()
    with context.time_account.timed(IDLE):
        return submitted.result()


def why_not_here(implementation: EngineImplementation, context: Context) -> str | None:
    """The same, also for a device that none of the engine's kernels runs on.

    Of an engine that is not installed nothing is imported.
    """
    if reason := implementation.unavailable(context.device):
        return reason
    return why_absent(implementation, context) if implementation.folders() else implementation.unavailable_reason()


def _absent(implementation: EngineImplementation) -> str | None:
    return implementation.unavailable_reason()


def compile_calls(
    implementation: EngineImplementation, shortlist: "pd.DataFrame", context: Context, rest_s: float
) -> None:
    """Compiles the engine's kernels for the finals in several processes; otherwise each first call would compile.

    `shortlist`: rows of this implementation alone; `rest_s`: the expected seconds of what follows.
    """
    specs = {p.id: context.family.spec(p) for p in context.problems}
    by_candidate: dict[Candidate, list[GemmSpec]] = {}
    for problem, libtype, config in shortlist[["problem", "libtype", "config"]].itertuples(index=False):
        by_candidate.setdefault(candidate_of(libtype, config), []).append(specs[problem])
    calls = [[(spec, candidate.knobs) for spec in specs] for candidate, specs in by_candidate.items()]
    processes = compile_processes(context)
    shares = [[call for some in calls[i::processes] for call in some] for i in range(processes)]
    began, expected_s = time.monotonic(), compile_seconds(calls=max(map(len, shares)))
    left = {
        future
        for share in shares
        if share and (future := context.pool.submit_task(_task(implementation, share, context))) is not None
    }
    total = len(left)
    context.events.emit("stage", f"compile for {implementation.label}", total=total, unit="processes", rest_s=rest_s)
    while left:
        context.check()
        with context.time_account.timed(IDLE):
            done, left = wait(left, timeout=POLL_S)
        share = compiled_share(time.monotonic() - began, expected_s, left=len(left) / total)
        context.events.emit("progress", done=total - len(left), total=total, share=share)
        for future in done:
            if (error := future.exception()) is not None:
                context.events.emit("detail", f"engine: {implementation.label}: {one_line(error)}")


def _task(
    implementation: EngineImplementation, calls: Sequence[tuple[GemmSpec, Knobs]], context: Context
) -> CompileCalls:
    return CompileCalls(implementation=implementation, device=context.device, calls=calls)
