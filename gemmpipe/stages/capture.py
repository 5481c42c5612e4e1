"""The first stage: from a source to the problems that are still to be tuned."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.data import Problem
from gemmpipe.events import counted
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.incumbents import native_tables
from gemmpipe.stages.rows import problem_frame
from gemmpipe.stages.worth import worthwhile
from gemmpipe.tables import store
from gemmpipe.tables.merging import SHARED, Key, key_of, provisional

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Capture(Stage):
    """Asks the source for problems and leaves out those that the tables in the output folder hold for this device.

    `tuned_too` leaves none out; `keep_pct` below 100 keeps only those that make up so much of the workload's time.
    """

    keep_pct: float
    tuned_too: bool

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ("problems",)
    asks_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.keep_pct <= 100:
            raise ValueError(f"keep_pct={self.keep_pct:g}, expected above 0 and at most 100")

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """The problems table. Raises UserError for a source or an output table that cannot be read."""
        found = self._worthwhile(context.source.problems(context.family, context.defaults, context.device.gfx), context)
        known = tuned(context)
        place = (context.device.gfx, context.device.cu_num)
        mine = {row["id"] for row in context.record.problems}  # merged by an earlier session of this very run
        fresh = [
            p
            for p in found
            if self.tuned_too or context.retune or p.id in mine or (*place, *(v for _, v in p.key)) not in known
        ]
        products = len({problem.siblings for problem in found})
        dropped = len(found) - len(fresh)
        context.events.emit(
            "line",
            f"capture: {counted(len(found), 'problem')} of {counted(products, 'product')}"
            + (f", {dropped} tuned already (retune=true tunes them again)" if dropped else ""),
        )
        left = context.source.left_out(context.family, context.defaults, context.device.gfx)
        if left:
            context.events.emit("line", f"  left out: {left}")
        return {"problems": problem_frame(context.family, fresh)}

    def _worthwhile(self, found: list[Problem], context: Context) -> list[Problem]:
        """The problems that matter, by recorded times or by an estimate."""
        if self.keep_pct == 100:
            return found
        recorded_us = context.source.recorded_us(context.family, context.defaults, context.device.gfx)
        kept, pct = worthwhile(found, context.family, recorded_us, self.keep_pct)
        how = "as recorded" if all(problem.id in recorded_us for problem in found) else "estimated from sizes"
        text = f"capture: {len(kept)} of {len(found)} problems make up {pct:.1f} % of the time, {how}; the rest is left"
        context.events.emit("line", text)
        return kept


def tuned(context: Context) -> set[Key]:
    """The keys that the output's native tables hold; rows that only fill a gap, or are another product's, do not count.

    Products such as an H100 and an H200 share gfx and cu_num.
    """
    here = (None, context.device.name)
    keys: set[Key] = set()
    for path in native_tables(context.family, context.output, (each for _, each in context.formats)):
        if path.is_file():
            rows = store.read(path, context.family)
            rows = [row for row in rows if row.get("device") in here and not _again(row.get("policy"), context)]
            keys |= {key_of(row, context.family) for row in rows}
    return keys


def _again(policy: object, context: Context) -> bool:
    """Times taken beside other work fill a gap once; who has the device alone takes them anew, and goes on with the
    search where it was cut short."""
    once = context.device.shared and SHARED in str(policy)
    return provisional(policy) and not once
