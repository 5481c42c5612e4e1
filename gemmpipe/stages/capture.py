"""The capture stage: the problems of a source that are not tuned yet."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.core.data import Problem
from gemmpipe.core.events import counted, verb
from gemmpipe.family.roofline import roofline_or_reference
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.history import native_tables
from gemmpipe.stages.workload import covering_problems
from gemmpipe.tables import store
from gemmpipe.tables.merge import CUT_SHORT, SHARED_CPU, SHARED_GPU, RowKey, is_provisional, row_key

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Capture(Stage):
    """Gets problems from the source and skips those that the tables in the output folder hold for this device.

    `include_tuned` skips none; `cover_pct` below 100 keeps the fewest that make up this share of the workload's time.
    """

    cover_pct: float
    include_tuned: bool

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ("problems",)
    needs_device_info: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.cover_pct <= 100:
            raise ValueError(f"cover_pct={self.cover_pct:g}, expected above 0 and at most 100")

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Sets the problems. Raises UserError for a source or an output table that cannot be read."""
        found = self._covering(context.source.problems(context.family, context.defaults, context.device.gfx), context)
        known = tuned_keys(context)
        device = (context.device.gfx, context.device.cu_num)
        mine = {row["id"] for row in context.record.problems}  # merged by an earlier session of this run
        fresh = [
            p
            for p in found
            if self.include_tuned or context.retune or p.id in mine or (*device, *(v for _, v in p.key)) not in known
        ]
        context.already_tuned[:] = sorted(set(found) - set(fresh), key=found.index)
        products = len({problem.shape_group for problem in found})
        dropped = len(found) - len(fresh)
        context.events.emit(
            "line",
            f"capture: {counted(len(found), 'problem')} of {counted(products, 'product')}"
            + (f", {dropped} already tuned (use retune=true to tune again)" if dropped else ""),
        )
        left = context.source.left_out(context.family, context.defaults, context.device.gfx)
        if left:
            context.events.emit("line", f"  left out: {left}")
        if assumed := context.source.assumed(context.device.gfx):
            context.events.emit("line", f"  assumed: {assumed}")
        context.problems[:] = fresh
        return {}

    def _covering(self, found: list[Problem], context: Context) -> list[Problem]:
        """The problems that make up `cover_pct` of the time, by recorded times or by an estimate."""
        if self.cover_pct == 100:
            return found
        recorded_us = context.source.recorded_us(context.family, context.defaults, context.device.gfx)
        roofline = roofline_or_reference(context.device.gfx, context.device.name, context.rooflines)
        kept, pct = covering_problems(found, context.family, recorded_us, self.cover_pct, roofline)
        how = "as recorded" if all(problem.id in recorded_us for problem in found) else "estimated from sizes"
        of_all = f"{len(kept):,} of {counted(len(found), 'problem')} {verb(len(kept), 'makes', 'make')} up"
        share = f"{of_all} {pct:.1f} % of the time, {how}"
        text = f"capture: {share}; the remaining problems are skipped"
        context.events.emit("line", text)
        return kept


def tuned_keys(context: Context) -> set[RowKey]:
    """The keys of the output's native tables, without provisional rows and rows of another device name.

    Devices such as an H100 and an H200 share gfx and cu_num.
    """
    names = (None, context.device.name)
    keys: set[RowKey] = set()
    for path in native_tables(context.family, context.output, (each for _, each in context.formats)):
        if path.is_file():
            rows = store.read(path, context.family)
            rows = [row for row in rows if row.get("device") in names and not _is_retuned(row.get("policy"), context)]
            keys |= {row_key(row, context.family) for row in rows}
    return keys


def _is_retuned(policy: object, context: Context) -> bool:
    """True for rows to tune again: provisional ones, except that a run on a shared device does not replace such times.

    A run with the device to itself replaces times of `device.shared=true` and from a shared GPU, and continues searches
    that were cut short. Times from a CPU that others used stay, since most CPUs are in use at any time: `retune=true`
    replaces them.
    """
    keeps = context.device.shared and SHARED_GPU in str(policy)
    on_shared_cpu = SHARED_CPU in str(policy) and CUT_SHORT not in str(policy)
    return is_provisional(policy) and not keeps and not on_shared_cpu
