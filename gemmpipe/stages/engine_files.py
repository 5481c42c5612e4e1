"""What an engine takes for a product today: its published file, its default, and the file in the output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.data import Candidate, Knobs, Problem
from gemmpipe.errors import UserError
from gemmpipe.family import Family
from gemmpipe.formats.engine_json import nearest_key
from gemmpipe.stages import Context, Form
from gemmpipe.stages.engine_grid import Grid, grid_of


@dataclass(frozen=True, kw_only=True)
class Product:
    """Problems that differ in M alone, and what an engine knows of them; candidates by M, in the order of a file."""

    grid: Grid
    published: Mapping[int, Candidate]
    standing: Mapping[int, Candidate]
    """Of the file in the output, from earlier runs."""
    default: Candidate | None

    def taken(self, m: int) -> tuple[Candidate, ...]:
        """What the engine takes for so many rows: without the output's file, and with it."""
        first = self.published[nearest_key(self.published, m)] if self.published else self.default
        second = self.standing[nearest_key(self.standing, m)] if self.standing else None
        return tuple(dict.fromkeys(c for c in (first, second) if c is not None))

    def known(self, m: int) -> tuple[Candidate, ...]:
        """The same, and the default, which may be better than either."""
        return tuple(dict.fromkeys((*self.taken(m), *([self.default] if self.default is not None else []))))


def product_of(form: Form, group: Sequence[Problem], context: Context) -> Product:
    """What is known of the product that these problems, one at least, are about."""
    family, device, implementation = context.family, context.device, form.implementation
    spec = family.spec(group[0])

    def candidates(paths: Sequence[Path]) -> dict[int, Candidate]:
        try:
            entries = form.format.entries(spec, device, paths)
        except UserError as error:
            context.events.emit("warning", f"engine: {form.name}: left out: {error}")
            return {}
        return {m: _candidate(knobs) for m, knobs in entries.items()}

    def _candidate(knobs: Knobs) -> Candidate:
        return Candidate.of(implementation.label, implementation.normalise(spec, knobs, device))

    published = candidates(form.published)
    standing = candidates([context.output / implementation.label])
    default = implementation.default(spec, device)
    return Product(
        grid=grid_of([p.rows for p in group], published, standing),
        published=published,
        standing=standing,
        default=None if default is None else _candidate(default),
    )


def at(family: Family, problem: Problem, m: int) -> Problem:
    """The same product with other rows, which the workload does not ask for."""
    key = tuple((name, m if name == family.rows_column else value) for name, value in problem.key)
    return family.problem(key, weight=0.0, layer=problem.layer)
