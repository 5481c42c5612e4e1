"""The data of a report from tuned tables alone: choices and their times, without the search behind them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmpipe.core.artifact import read_runs, sidecar_path
from gemmpipe.core.errors import UserError, suggest, suggest_or_list
from gemmpipe.core.events import counted
from gemmpipe.core.schema import FROM_FILE
from gemmpipe.family import Family, load_family, shipped_families
from gemmpipe.report.data import TABLE, RunData
from gemmpipe.report.product_table import product_frame
from gemmpipe.tables import store
from gemmpipe.tables.file_names import family_of_file_name
from gemmpipe.tables.merge import row_key, used_rows

_NAMES = 3
"""Names of tables that an error shows."""


@dataclass(frozen=True, kw_only=True)
class TableSource:
    """A tuned table and the family of its products."""

    path: Path
    family: Family


def table_source(path: Path, kernel: str | None, importable: frozenset[str] = frozenset()) -> TableSource:
    """The table of a path; the family is `kernel`, else follows from the file's name. Raises UserError."""
    if kernel and kernel not in {*shipped_families(), *importable}:
        raise UserError(f"kernel={kernel}: no such family{suggest_or_list(kernel, shipped_families())}")
    known = {name: load_family(name) for name in ([kernel] if kernel else shipped_families())}
    name = kernel or family_of_file_name(path.name, known)
    if name is None:
        names = sorted({family.csv_name for family in known.values()}, key=lambda each: (len(each), each))
        some = f"{', '.join(names[:_NAMES])}{suggest(path.name, names)}"
        raise UserError(f"{path}: no table's name; expected kernel=FAMILY, or a name such as {some}")
    return TableSource(path=path, family=known[name])


def read_tables(sources: Sequence[TableSource]) -> RunData:
    """The data of tables of one family, at least one; of several rows of a key in one table those that are used.

    Raises UserError for a table that cannot be read.
    """
    family = sources[0].family
    rows: list[dict[str, Any]] = []
    provenance: dict[str, Mapping[str, Any]] = {}
    notes: list[str] = []
    for source in sources:
        table = store.load(source.path, family)
        runs = _sidecar(source.path, notes)
        provenance |= runs
        # Rows of buckets are of no product: they must not compete with those of products.
        of_products = [row for row in table.rows if not row.get("format")]
        named = store.with_device_names(of_products, runs)
        used = used_rows(named, lambda row: row_key(row, family), lambda row: row)
        rows += [{**row, "place": source.path.name, "chosen_by": "select"} for row in used]
        if len(used) < len(named):
            left_out = counted(len(named) - len(used), "row")
            notes.append(f"{source.path.name}: {left_out} left out: another row of the same key has precedence.")
        if table.refused:
            notes.append(f"{source.path.name}: {counted(len(table.refused), 'row')} without a time left out.")
    products = product_frame(rows, family)
    notes += _read_from_files(rows)
    notes.append(
        "Tables hold the choices alone: the search, the near-ties' names, the wall time and the state of the device "
        "are in the folder of the run."
    )
    return RunData(
        family=family,
        origin=", ".join(str(source.path) for source in sources),
        state=TABLE,
        state_word=TABLE,
        products=products,
        problems=len(products),
        provenance=provenance,
        command=commands[0] if len(commands := sorted(set(_commands(provenance)))) == 1 else "",
        started=max((str(facts.get("time", "")) for facts in provenance.values()), default=""),
        files=[str(source.path) for source in sources],
        notes=notes,
    )


def _sidecar(path: Path, notes: list[str]) -> dict[str, Mapping[str, Any]]:
    """The runs of a table's sidecar file; a broken one is noted."""
    try:
        return dict(read_runs(sidecar_path(path)))
    except UserError as error:
        notes.append(f"Provenance left out: {error}.")
        return {}


def origin_text(row: Mapping[Any, Any]) -> str:
    """The origin of a row's time: a run and its way of measuring, or a file that does not state it."""
    run, policy = str(row.get("run_id") or ""), str(row.get("policy") or "")
    how = f"measured as {policy}" if policy else "how it was measured is not known"
    if run.startswith(FROM_FILE):
        return f"time read from {run.removeprefix(FROM_FILE)}, which names no run; {how}"
    return f"time of run {run}; {how}" if run else f"time of an unknown run; {how}"


def _read_from_files(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A note on rows of a table that name no run."""
    origins = Counter(str(row.get("run_id") or "") for row in rows)
    for run, count in origins.items():
        if not run or run.startswith(FROM_FILE):
            place = f"with times read from {run.removeprefix(FROM_FILE)}" if run else "without a run"
            yield f"{counted(count, 'row')} {place}: how they were measured is not known."


def _commands(provenance: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for facts in provenance.values():
        recipe = facts.get("recipe")
        if isinstance(recipe, str):
            yield recipe
