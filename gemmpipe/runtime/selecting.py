"""What may answer a call, best first: the exact row, padded ones, then the rules."""

from collections.abc import Iterator
from dataclasses import dataclass

from gemmpipe.data import Device, Problem
from gemmpipe.family import GemmSpec
from gemmpipe.runtime.choosing import Chosen, fallbacks, usable
from gemmpipe.runtime.lookup import levels
from gemmpipe.runtime.selection import LOG
from gemmpipe.runtime.tables import Tables
from gemmpipe.tables.recorded import Unusable


@dataclass(frozen=True, kw_only=True)
class Selected:
    """One answer to a look-up: how it was found and what to run."""

    step: str
    """`exact`, `padded` or `fallback`."""
    source: str
    chosen: Chosen

    @property
    def words(self) -> str:
        """The candidate, for people."""
        chosen = self.chosen
        knobs = " ".join(f"{name}={value}" for name, value in chosen.candidate.items)
        rows = "" if chosen.rows is None else f" on {chosen.rows} rows"
        return f"{chosen.candidate.backend} {knobs}".strip() + rows

    def failure(self, error: Exception) -> str:
        """What is said when it fails at its first call."""
        text = str(error).strip().splitlines() or [type(error).__name__]
        return f"{self.source}: {self.words} failed and is skipped: {type(error).__name__}: {text[0]}"


def selections(tables: Tables, problem: Problem, spec: GemmSpec, device: Device) -> Iterator[Selected]:
    """The rows that can run, in the order of `lookup.levels`, then the rules; a row that cannot costs a warning."""
    for m, step in levels(spec.m, spec.n).items():
        yield from _at(tables, problem, m, step, spec, device)
    for chosen in fallbacks(tables.family, spec, device):
        yield Selected(step="fallback", source="rules", chosen=chosen)


def _at(tables: Tables, problem: Problem, m: int, step: str, spec: GemmSpec, device: Device) -> Iterator[Selected]:
    """The rows of one M."""
    alternatives = tables.find(device, (m if name == problem.rows_column else value for name, value in problem.key))
    if not alternatives:
        LOG.step(f"{problem.id}: {step} M={m}: no row")
    for found in alternatives:
        try:
            chosen = usable(tables.family, found.row, spec, device)
        except Unusable as reason:
            LOG.step(f"{problem.id}: {step} M={m}: {found.path}: skipped: {reason}")
            # A row tuned for another M may well not fit this one.
            if step == "exact" or not str(reason).startswith("misfit"):
                LOG.warn(
                    f"{tables.family.name} {found.path} {reason}",
                    f"{found.path}: {problem.id}: the stored candidate is skipped here: {reason}",
                )
            continue
        product = found.row.get("device")
        if product not in (None, "", device.name):  # gfx and cu_num are the same on an H100 and an H200
            LOG.warn(
                f"{found.path} of {product}",
                f"{found.path}: rows timed on {product} answer on {device.name}: gfx and cu_num are the same",
            )
        yield Selected(step=step, source=f"M={m} of {found.path}", chosen=chosen)
