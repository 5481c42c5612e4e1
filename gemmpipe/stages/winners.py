"""The winners of a tuned table as problems and candidates, and why one of them does not stand any more."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from gemmpipe.asking import Raised
from gemmpipe.data import Candidate, Device, Problem
from gemmpipe.errors import UserError
from gemmpipe.family import GemmSpec, Implementation
from gemmpipe.stages import Context
from gemmpipe.stages.verdict import Judge
from gemmpipe.tables.merging import Row
from gemmpipe.tables.recorded import Unusable, library_of, recorded_candidate
from gemmpipe.tables.store import timed


@dataclass(frozen=True, kw_only=True)
class Winner:
    """A row's problem and, unless there is a reason against it, its candidate and who computes it."""

    problem: Problem
    device: Device
    spec: GemmSpec | None = None
    implementation: Implementation | None = None
    candidate: Candidate | None = None
    reason: str = ""


def winners(context: Context, rows: Iterable[Row], device_for: Callable[[Row], Device]) -> Iterator[Winner]:
    """A winner a row, in order; `device_for` says which device the row is for."""
    for row in rows:
        device = device_for(row)
        problem = context.family.problem(tuple((c.name, row[c.name]) for c in context.family.key_columns))
        try:
            yield _winner(context, row, problem, device)
        except (Unusable, UserError) as error:
            yield Winner(problem=problem, device=device, reason=str(error))


def _winner(context: Context, row: Row, problem: Problem, device: Device) -> Winner:
    spec = context.family.spec(problem)
    label = library_of(row, context.family)
    implementation = context.implementation(label)
    if not timed(row):
        raise Unusable(f"time: us is {row.get('us')}, no time that was measured")
    if implementation is None:
        raise Unusable(f"backend: no '{label}' among the backends of this run")
    if context.device == device and (missing := implementation.unavailable(device)):
        raise Unusable(f"backend: {label}: {missing}")
    candidate = recorded_candidate(implementation, row, spec, device)
    return Winner(problem=problem, device=device, spec=spec, implementation=implementation, candidate=candidate)


def rivals(context: Context, spec: GemmSpec, most: int) -> Iterator[tuple[Implementation, Candidate]]:
    """The library paths that a winner is held against: the first `most` of each label of the family's baseline."""
    for label in context.family.baseline:
        implementation = context.implementation(label)
        if implementation is None:
            continue
        judge = Judge(implementation=implementation, spec=spec, device=context.device)
        try:
            offer = judge.offer(context.space)
        except Raised as raised:
            context.events.emit("warning", f"{label}: left out: {raised}")
            continue
        yield from ((implementation, candidate) for candidate in islice(judge.fitting(offer), most))
