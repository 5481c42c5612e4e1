"""The builds of a candidate: screening uses one memory order of x's block scales, the finals all orders.

An engine's kernel has different forms in screening and in the finals.
"""

import contextlib
from collections.abc import Collection, Iterable

from gemmpipe.backends.engine import EngineImplementation
from gemmpipe.bench.finals import FinalsJob
from gemmpipe.core.data import Build, Candidate, Device, Knobs, Problem
from gemmpipe.core.events import counted
from gemmpipe.executors import BuildResult, JobResult
from gemmpipe.family import GemmSpec, Implementation
from gemmpipe.family.guard import PluginError, call_plugin
from gemmpipe.stages import Context

SHARE_WHILE_SCREENING = 0.8
"""The share of compile processes that may build for the finals: the others start a search's next builds at once."""
_SHARE_WHILE_TIMING = 0.5
"""The same share while finals are timed and others are ready. A cold run of 72 problems (H200, 16 cores, 2026-11-23;
simulated from its journal) then waits for no build."""


def screening_builds(implementation: Implementation, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
    """The builds for the memory order that screening times, the first of `GemmSpec.x_scale_orders`."""
    return implementation.builds(spec.with_scale_order(spec.x_scale_orders[0]), knobs, device)


def finals_form(implementation: Implementation) -> Implementation:
    """The implementation whose builds the finals launch; imports no engine.

    Where an engine is installed the finals call its function, which compiles by itself: no other form is needed.
    """
    if isinstance(implementation, EngineImplementation) and not implementation.folders():
        return implementation.exact_form()
    return implementation


def extra_order_builds(
    implementation: Implementation, spec: GemmSpec, knobs: Knobs, device: Device
) -> tuple[Build, ...]:
    """The builds of the finals, for the other orders and the other form, without those of screening."""
    form = finals_form(implementation)
    if len(spec.x_scale_orders) == 1 and form is implementation:
        return ()
    known = {build.id for build in screening_builds(implementation, spec, knobs, device)}
    needed = (
        b for order in form.timed_scale_orders(spec) for b in form.builds(spec.with_scale_order(order), knobs, device)
    )
    return tuple({b.id: b for b in needed if b.id not in known}.values())


def compile_ahead(problem: Problem, finalists: Iterable[Candidate], context: Context) -> None:
    """Queues the builds that the finals of these candidates need beyond those of screening."""
    spec = context.family.spec(problem)
    for candidate in finalists:
        context.builds_ahead.add(_extra_builds(candidate, problem, spec, context))


def _extra_builds(candidate: Candidate, problem: Problem, spec: GemmSpec, context: Context) -> tuple[Build, ...]:
    known = context.builds_ahead.known
    if (problem.id, candidate) not in known:
        implementation = context.implementation(candidate.backend)
        builds: tuple[Build, ...] = ()
        # A launch in this order raises the same error, which is then in the candidate's trial.
        with contextlib.suppress(PluginError):
            if implementation is not None:
                builds = call_plugin(
                    implementation, lambda: extra_order_builds(implementation, spec, candidate.knobs, context.device)
                )
        known[problem.id, candidate] = builds
    return known[problem.id, candidate]


class FinalsBuilds:
    """Delays the finals of a problem until its builds are compiled; finals of other problems are timed meanwhile.

    Compile processes have a lower priority than the worker that is timing, and leave it half of the cores if possible.
    """

    def __init__(self, jobs: Iterable[FinalsJob], screened: Collection[tuple[str, str]], context: Context) -> None:
        """`screened`: (problem id, candidate id) of the finalists that screening timed.

        The builds of other finalists were compiled by an earlier stage, or are unknown. On a CPU nothing is compiled.
        """
        self._context, self._ahead = context, context.builds_ahead
        self._waiting = {job.problem.id: job for job in jobs}
        self._needed: dict[str, dict[str, list[Candidate]]] = {name: {} for name in self._waiting}
        """By problem id, then build id: the candidates that need it."""
        builds: dict[str, Build] = {}
        for job in self._waiting.values() if context.device.kind != "cpu" else ():
            spec = context.family.spec(job.problem)
            for candidate in (c for c in job.candidates if (job.problem.id, c.id) in screened):
                for build in _extra_builds(candidate, job.problem, spec, context):
                    builds[build.id] = build
                    self._needed[job.problem.id].setdefault(build.id, []).append(candidate)
        self._ahead.replace(builds.values())
        if builds:
            done = sum(build in self._ahead.errors for build in builds)
            kernels = f"{counted(len(builds), 'kernel')} beyond those of the screening"
            context.events.emit("detail", f"bench: {kernels}, {done:,} compiled during screening")

    def send(self, *, enough_ready: bool) -> None:
        """Keeps compile processes busy: half of them if more finals are ready than the devices need now."""
        self._ahead.send(self._context.pool, _SHARE_WHILE_TIMING if enough_ready else 1.0)

    def receive(self, message: BuildResult | JobResult) -> None:
        """Takes results of builds; those left over from screening are ignored."""
        if isinstance(message, BuildResult) and self._ahead.receive(message):
            self._context.journal.build(message.build.id, message.facts)

    def take_ready(self) -> list[tuple[FinalsJob, dict[Candidate, str]]]:
        """The jobs that wait no longer, each once, with the compiler's errors by candidate."""
        errors = self._ahead.errors
        ready = [name for name in self._waiting if self._needed[name].keys() <= errors.keys()]
        failed = {
            name: {c: errors[b] for b, needing in self._needed[name].items() if errors[b] for c in needing}
            for name in ready
        }
        return [(self._waiting.pop(name), failed[name]) for name in ready]
