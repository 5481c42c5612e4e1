"""The builds of a candidate: for screening in one memory order of x's block scales, for the finals in all orders."""

from collections.abc import Collection, Iterable, Mapping

from gemmpipe.bench.finals import FinalsJob
from gemmpipe.core.data import Build, Candidate, Device, Knobs
from gemmpipe.core.events import counted
from gemmpipe.executors import BuildResult, drain_on_interrupt
from gemmpipe.family import GemmSpec, Implementation
from gemmpipe.family.guard import PluginError, call_plugin
from gemmpipe.stages import POLL_S, Context


def screening_builds(implementation: Implementation, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
    """The builds for the order in which screening times it, the first of `GemmSpec.x_scale_orders`."""
    return implementation.builds(spec.with_scale_order(spec.x_scale_orders[0]), knobs, device)


def extra_order_builds(
    implementation: Implementation, spec: GemmSpec, knobs: Knobs, device: Device
) -> tuple[Build, ...]:
    """The builds for the other orders, in which the finals time it, without those that screening needs."""
    if len(spec.x_scale_orders) == 1:
        return ()
    known = {build.id for build in screening_builds(implementation, spec, knobs, device)}
    needed = (
        b
        for order in implementation.timed_scale_orders(spec)
        for b in implementation.builds(spec.with_scale_order(order), knobs, device)
    )
    return tuple({b.id: b for b in needed if b.id not in known}.values())


def compile_extra_orders(
    jobs: Iterable[FinalsJob], screened: Collection[tuple[str, str]], context: Context
) -> dict[str, dict[Candidate, str]]:
    """Compiles in parallel what finalists need beyond screening, as each worker would do it one by one.

    `screened`: (problem id, candidate id) of the finalists that screening timed; an earlier stage has compiled the
    builds of the others, or they are unknown. Returns the compiler's errors by problem id and candidate. On a CPU
    kernels are interpreted and nothing is compiled. Raises Interrupted.
    """
    if context.device.kind == "cpu":
        return {}
    builds: dict[str, Build] = {}
    needed_by: dict[str, list[tuple[str, Candidate]]] = {}
    for job in jobs:
        spec = context.family.spec(job.problem)
        for candidate in (c for c in job.candidates if (job.problem.id, c.id) in screened):
            for build in _extra_builds(candidate, spec, context):
                builds[build.id] = build
                needed_by.setdefault(build.id, []).append((job.problem.id, candidate))
    failures: dict[str, dict[Candidate, str]] = {}
    for build_id, error in _compile(builds, context).items():
        for problem, candidate in needed_by[build_id]:
            failures.setdefault(problem, {})[candidate] = error
    return failures


def _extra_builds(candidate: Candidate, spec: GemmSpec, context: Context) -> tuple[Build, ...]:
    implementation = context.implementation(candidate.backend)
    if implementation is None:
        return ()
    try:
        return call_plugin(
            implementation, lambda: extra_order_builds(implementation, spec, candidate.knobs, context.device)
        )
    except PluginError:
        return ()  # a launch in this order raises the same error, which is then in the candidate's trial


def _compile(builds: Mapping[str, Build], context: Context) -> dict[str, str]:
    """Waits until all are compiled; returns errors by build id. Nothing is timed meanwhile, as compilers disturb it."""
    for build in builds.values():
        context.pool.compile(build)
    errors: dict[str, str] = {}
    open_ = set(builds)
    with drain_on_interrupt(context.pool, lambda message: None):
        while open_:
            context.check()
            for message in context.pool.poll(POLL_S):
                if (
                    isinstance(message, BuildResult) and message.build.id in open_
                ):  # others are left over from screening
                    open_.discard(message.build.id)
                    context.journal.build(message.build.id, message.facts)
                    if message.facts.error:
                        errors[message.build.id] = message.facts.error
    if builds:
        context.events.emit("detail", f"bench: {counted(len(builds), 'kernel')} for the other order of x's scales")
    return errors
