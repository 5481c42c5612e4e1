"""The merge stage: writes selections into the artifacts that engines load."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.core.data import Scalar
from gemmpipe.core.errors import UserError, suggest_or_list
from gemmpipe.core.paths import tables_variable
from gemmpipe.engines.launch import ServerArguments, plugin_lines, plugin_switch, use_lines
from gemmpipe.formats import Format, Target
from gemmpipe.formats.engine_filenames import kinds_of_files
from gemmpipe.stages import Context, Stage
from gemmpipe.tables.merge import Row, RowPreference
from gemmpipe.tables.recorded import kernel_changed
from gemmpipe.templates.params import CLUSTER_SIZE, CTAS_PER_SM, SWAP_AB, TILED_AXES

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Merge(Stage):
    """Passes each format the problems' selections and those of its buckets; the format writes them.

    `device`: the name (`NVIDIA H200`) of the device to keep rows of, where tables hold several rows of a key.
    """

    device: str | None

    needs: ClassVar[tuple[str, ...]] = ("selections",)
    gives: ClassVar[tuple[str, ...]] = ("artifacts",)
    accumulates: ClassVar[tuple[str, ...]] = ("selections",)  # a default file holds the commonest choice of all shapes

    def check(self, context: Context) -> None:
        """Warns if no format is chosen. Raises UserError for a bucket that requires a knob no candidate has."""
        if not context.formats:  # a valid choice where only times matter
            context.events.emit("warning", "format=[]: merge writes nothing; use format=[csv] for the tuned table")
        known = {*context.space.axes, *TILED_AXES, SWAP_AB, CTAS_PER_SM, CLUSTER_SIZE}
        for _, each in context.formats:
            for where, knobs in each.constraints(context.family).items():
                for knob in knobs:
                    if knob not in known:
                        raise UserError(f"{where}.{knob}: no such knob{suggest_or_list(knob, known)}")

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns the written files. Raises UserError for an existing artifact that cannot be read, and keeps it."""
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
                # A CPU runs none of the kernels that a file by ranges of M describes: no news there.
                kind = "detail" if context.device.kind == "cpu" and len(mine) and not context.inputs else "line"
                context.events.emit(kind, f"merge: {name}: no rows to write{_why_nothing(mine, name, each, context)}")
            for path in paths:
                context.events.emit("line", f"merge: {name}: {path}")
                written.append({"format": name, "file": str(path)})
            for line in _use_lines(name, each, paths, context):
                if line not in context.final_lines:  # of an earlier batch
                    context.final_lines.append(line)
        return {"artifacts": pd.DataFrame(written, columns=["format", "file"])}


def _why_nothing(mine: "pd.DataFrame", name: str, form: Format, context: Context) -> str:
    if not len(mine):
        return ": no problem has a selection"
    if (mine["format"] == name).any():
        return ": the format can express none of its selections"
    if not form.buckets(context.family, mine[context.family.rows_column].astype(int).tolist()):
        return f": it has no file for products of {context.family.name}"
    if context.inputs:  # times of single Ms: not enough for a choice over a range
        if form.engine() is not None:
            return (
                f": tables hold no times of {name}'s own function; 'gemmpipe export RUN {name}' writes those of a run"
            )
        return ": tables hold no selections for ranges of M; these need a run that times candidates (tune)"
    return ": no range of M has a selection for it"


def _use_lines(name: str, form: Format, paths: Sequence[Path], context: Context) -> list[str]:
    """How a server uses the files of an engine's format; or the table, if the problems are those of a server."""
    server = context.source.server()
    if not paths:
        return []
    if form.engine() is not None:
        mine = server if server is not None and server.engine == name else ServerArguments(engine=name)
        usual = context.output.absolute() == Path("outputs/tuned").absolute()
        export = ["gemmpipe", "export", "last", name, *([] if usual else [f"output={context.output}"])]
        return use_lines(mine, kinds_of_files(name, paths), context.output / name, export=export)
    table = form.table(context.family, context.output)
    if server is None or table is None or table not in paths:
        return []
    columns = [column.name for column in context.family.key_columns]
    return plugin_lines(server, tables_variable(context.family.name), table.absolute(), plugin_switch(columns))


class _KernelChanges:
    """True for rows with a kernel that has another source now; each kernel is checked once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[tuple[Scalar, ...], bool] = {}

    def __call__(self, row: Row) -> bool:
        kernel = (row.get("libtype"), row.get("kernelName"), row.get("config"))
        if kernel not in self._known:
            implementation = self._context.implementation(str(row.get("libtype")))
            self._known[kernel] = implementation is not None and kernel_changed(implementation, row)
        return self._known[kernel]
