"""What may answer a call, best first: the exact row, padded ones, then the rules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gemmpipe.data import Device, Problem
from gemmpipe.family import GemmSpec
from gemmpipe.operand_types import X_SCALE
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


def selections(
    tables: Tables, problem: Problem, spec: GemmSpec, device: Device, orders: Sequence[str] = ()
) -> Iterator[Selected]:
    """The rows that can run, in the order of `lookup.levels`, then the rules; a row that cannot costs a warning.

    `orders` are those in which x's scales lie: rows for one of them come before rows for any.
    """
    for m, step in levels(spec.m, spec.n).items():
        yield from _at(tables, problem, m, step, spec, device, orders)
    for chosen in fallbacks(tables.family, spec, device):
        yield Selected(step="fallback", source="rules", chosen=chosen)


def _at(
    tables: Tables, problem: Problem, m: int, step: str, spec: GemmSpec, device: Device, orders: Sequence[str]
) -> Iterator[Selected]:
    """The rows of one M."""
    own = {problem.rows_column: m}
    keys = ({**dict(problem.key), **own, **({X_SCALE.name: order} if order else {})} for order in orders)
    plain = {**dict(problem.key), **own, **({X_SCALE.name: None} if orders else {})}
    alternatives = [found for key in (*keys, plain) for found in tables.find(device, key.values())]
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
