"""The last stage: from selections to the artifacts that engines load."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import UserError, suggest_or_list
from gemmpipe.formats import Format, Target
from gemmpipe.stages import Context, Stage
from gemmpipe.tables.merge import Row
from gemmpipe.tables.recorded import kernel_changed
from gemmpipe.tables.unite import RowPreference
from gemmpipe.templates.params import CLUSTER_SIZE, CTAS_PER_SM, SWAP_AB, TILED_AXES

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Merge(Stage):
    """Gives every format the problems' own selections and those of its buckets; the format stores them.

    `device` is the product (`NVIDIA H200`) whose rows are kept where tables hold several that share a key.
    """

    device: str | None

    needs: ClassVar[tuple[str, ...]] = ("selections",)
    gives: ClassVar[tuple[str, ...]] = ("artifacts",)
    accumulates: ClassVar[tuple[str, ...]] = ("selections",)  # a default file holds the commonest of all shapes

    def check(self, context: Context) -> None:
        """Tells that nothing is to be stored. Raises UserError for a bucket that asks for a knob no candidate has."""
        if not context.formats:  # who looks at times alone may mean it
            context.events.emit("warning", "format=[]: merge stores nothing; format=[csv] keeps the tuned table")
        known = {*context.space.axes, *TILED_AXES, SWAP_AB, CTAS_PER_SM, CLUSTER_SIZE}
        for _, each in context.formats:
            for where, knobs in each.constraints(context.family).items():
                for knob in knobs:
                    if knob not in known:
                        raise UserError(f"{where}.{knob}: no such knob{suggest_or_list(knob, known)}")

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """A table of `format` and `file`. Raises UserError for an artifact that was broken by hand, which stays."""
        import pandas as pd

        selections = tables["selections"]
        target = Target(
            folder=context.output,
            device=context.device,
            run_id=context.run_id,
            provenance=context.provenance,
            events=context.events,
            preference=RowPreference(device=self.device, is_stale=_KernelChanges(context)),
        )
        written: list[dict[str, str]] = []
        for name, each in context.formats:
            mine = selections[selections["format"].fillna("").isin(["", name])]
            paths = each.write(context.family, mine, target)
            if not paths:
                context.events.emit("line", f"merge: {name}: nothing to store{_why_nothing(mine, name, each, context)}")
            for path in paths:
                context.events.emit("line", f"merge: {name}: {path}")
                written.append({"format": name, "file": str(path)})
        return {"artifacts": pd.DataFrame(written, columns=["format", "file"])}


def _why_nothing(mine: "pd.DataFrame", name: str, form: Format, context: Context) -> str:
    if not len(mine):
        return ": no problem has a selection"
    if (mine["format"] == name).any():
        return ": none of its choices fits what it can hold"
    if not form.buckets(context.family, mine[context.family.rows_column].astype(int).tolist()):
        return f": it has no file for products of {context.family.name}"
    if context.inputs:  # times of single Ms, of which no choice over a range can be made
        return ": tables hold no choices over ranges of M, which select makes in a run that times (tune)"
    return ": no range of M has a choice for it"


class _KernelChanges:
    """Whether the kernels that rows name have another source now; each is asked about once, rows are many."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[tuple[Scalar, ...], bool] = {}

    def __call__(self, row: Row) -> bool:
        said = (row.get("libtype"), row.get("kernelName"), row.get("config"))
        if said not in self._known:
            implementation = self._context.implementation(str(row.get("libtype")))
            self._known[said] = implementation is not None and kernel_changed(implementation, row)
        return self._known[said]
