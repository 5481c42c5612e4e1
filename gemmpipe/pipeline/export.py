"""Selections of a finished run, or rows of a tuned table, written by a format that the run need not have had."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe import journal
from gemmpipe.core import schema
from gemmpipe.core.artifact import read_runs, sidecar_path
from gemmpipe.core.data import Device, Scalar
from gemmpipe.core.device import NO_DEVICE
from gemmpipe.core.errors import UserError, quoted_repr
from gemmpipe.core.events import Events
from gemmpipe.core.files import is_number, read_cells
from gemmpipe.core.paths import MANIFEST, SELECTIONS
from gemmpipe.core.shell import shell_join
from gemmpipe.family import Family, KeyColumn, load_family
from gemmpipe.family.problem import parse_key_value
from gemmpipe.formats import Format, Target
from gemmpipe.formats.native import NativeCsv
from gemmpipe.pipeline.manifest import device_of
from gemmpipe.report.run_folder import nothing_timed, read_manifest, unended_text
from gemmpipe.report.tables import TableSource
from gemmpipe.stages.load import selections_frame
from gemmpipe.tables.file_names import table_arguments
from gemmpipe.tables.merge import REPLAYED
from gemmpipe.tables.store import parse_table
from gemmpipe.tables.unite import entries_of

if TYPE_CHECKING:
    import pandas as pd

_TEXT_COLUMNS = (
    *("problem", "format", "bucket", "config", "kernelName", "backend_ratios", "policy", "run_id", "device", "layer"),
    "reason",
)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices to export: of a finished run, or the rows of a table."""

    place: Path
    """The run's folder, or the table."""
    is_run: bool
    family: Family
    device: Device
    """The device that they were timed on; NO_DEVICE for a table, where each row has its own."""
    selections: "pd.DataFrame"
    run_id: str
    provenance: Mapping[str, Scalar | Mapping[str, Scalar]]
    tables: tuple[Path, ...]
    """The native tables that contain them."""
    config: Mapping[str, object]
    """The run's configuration; empty for a table."""

    @property
    def formats(self) -> frozenset[str]:
        """The formats with selections: `""` is each problem's own."""
        return frozenset(self.selections["format"].fillna("").tolist())

    @property
    def shapes(self) -> Mapping[str, object]:
        """The run's options of `shapes`; empty for a table."""
        found = self.config.get("shapes")
        return found if isinstance(found, dict) else {}

    @property
    def arguments(self) -> list[str]:
        """The arguments of a command that reads them: the place, and the kernel of a table whose name gives none."""
        return [str(self.place)] if self.is_run else table_arguments(self.place, self.family)

    def write(self, form: Format, folder: Path, events: Events) -> list[Path]:
        """The files that a format writes for them. Raises UserError for a damaged file, which stays unchanged."""
        target = Target(
            folder=folder, device=self.device, run_id=self.run_id, provenance=self.provenance, events=events
        )
        name = getattr(form, "name", "")
        mine = self.selections[self.selections["format"].fillna("").isin(["", name])]
        return form.write(self.family, mine, target)


def choices_of_run(folder: Path, families: Collection[str]) -> Choices:
    """The selections of a finished run of one of these families.

    Raises UserError for a folder that is none, and for damaged files.
    """
    import pandas as pd

    for name in (journal.NAME, MANIFEST, SELECTIONS):
        if not (folder / name).is_file():
            if reason := nothing_timed(folder):
                raise UserError(f"{folder}: {reason}")
            hint = f"; {unended_text(folder)}" if (folder / journal.NAME).is_file() else ""
            raise UserError(f"{folder}: no {name} there, expected the folder of a finished run{hint}")
    manifest = read_manifest(folder)
    config = manifest.get("config")
    config = config if isinstance(config, dict) else {}
    family = _family(config.get("kernel"), folder, families)
    rows = list(read_cells(folder / SELECTIONS))
    names = rows[0][1] if rows else []
    if missing := sorted({"format", "bucket", "libtype", "config"} - set(names)):
        raise UserError(f"{folder / SELECTIONS}: no column {missing[0]}, expected the selections of a run")
    keys = {column.name: column for column in family.key_columns}
    try:
        cells = [
            [_value(name, cell, keys.get(name)) for name, cell in zip(names, row, strict=False)] for _, row in rows[1:]
        ]
    except UserError as error:
        raise UserError(f"{folder / SELECTIONS}: {error}") from None
    sessions = journal.read(folder).sessions
    if not sessions:
        raise UserError(f"{folder}: no row of its journal names the device, expected a session row")
    versions = sessions[-1].get("versions")
    if isinstance(versions, Mapping) and REPLAYED in versions:
        raise UserError(f"{folder}: a replay of recorded times, expected a run that timed its choices")
    files = manifest.get("files")
    provenance = manifest.get("provenance")
    return Choices(
        place=folder,
        is_run=True,
        family=family,
        device=device_of(sessions[-1]),
        selections=pd.DataFrame(cells, columns=names, dtype=object),
        run_id=folder.name,
        provenance=provenance if isinstance(provenance, dict) else {},
        tables=tuple(path for text in files or () if _is_table(path := Path(str(text)), family))
        if isinstance(files, list)
        else (),
        config=config,
    )


def choices_of_table(source: TableSource) -> Choices:
    """The rows of a tuned table. Raises UserError for a file that is none."""
    path, family = source.path, source.family
    entries = entries_of(path, family, parse_table(path, family), read_runs(sidecar_path(path)))
    if not entries:
        raise UserError(f"{path}: no rows, expected a tuned table")
    return Choices(
        place=path,
        is_run=False,
        family=family,
        device=NO_DEVICE,
        selections=selections_frame(family, entries),
        run_id="",
        provenance={},
        tables=(path,),
        config={},
    )


def architectures_of(choices: Choices) -> tuple[str, ...]:
    """The architectures on which a run's or a table's rows were timed, sorted."""
    if choices.is_run:
        return (choices.device.gfx,)
    found = choices.selections["gfx"].dropna() if "gfx" in choices.selections else ()
    return tuple(sorted({str(gfx) for gfx in found}))


def own_table(choices: Choices, folder: Path | None, events: Events) -> Path:
    """The native table with these choices: written to `folder`, else the one that the run wrote.

    Raises UserError where the run has no selections of single problems, or its table is no longer there.
    """
    if "" not in choices.formats:
        raise UserError(
            f"{choices.place}: only an engine's function was timed, and no problem has a selection of its own; "
            f"expected {shell_join(['gemmpipe', f'reuse={choices.place}', 'format=[csv]'])}"
        )
    if folder is None:
        if choices.tables:
            return choices.tables[0]
        raise UserError(f"{choices.place}: the table that it wrote is not there; expected output=DIR to write it again")
    own = choices.selections[choices.selections["format"].fillna("") == ""]
    written = replace(choices, selections=own).write(NativeCsv(file=None, sort=False), folder, events)
    return written[0]


def _is_table(path: Path, family: Family) -> bool:
    return path.name.endswith(family.csv_name) and path.is_file() and "aiter" not in path.parts[-2:-1]


def _family(kernel: object, folder: Path, families: Collection[str]) -> Family:
    """The run's family: loading one imports it, so that only known ones are loaded."""
    name = kernel.get("family") if isinstance(kernel, dict) else None
    if name not in families:
        given = f"kernel {quoted_repr(str(name))}" if name else "no kernel"
        raise UserError(f"{folder / MANIFEST}: {given}; expected a shipped one, or --config-dir with your own")
    return load_family(str(name))


def _value(name: str, cell: str, key: KeyColumn | None) -> Scalar:
    """A cell as it was before it was written: text, number, or None; an apostrophe guards formulas.

    `key`: the column of the family's key with this name. Raises UserError for a value that the key cannot have.
    """
    if not cell:
        return None
    if key is not None:
        try:
            return parse_key_value(key, cell.removeprefix("'"), "")
        except UserError as error:
            raise UserError(f"column {name}: {error}") from None
    if name in _TEXT_COLUMNS or name not in (*schema.SELECTIONS, *schema.RESULT):
        return cell.removeprefix("'") if cell[1:2] in ("=", "+", "-", "@") else cell
    if not is_number(cell):
        return cell
    number = float(cell)
    return int(number) if number.is_integer() and "." not in cell else number
