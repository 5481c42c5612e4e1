"""The choices of a run or of a tuned table for comparison, read without torch or pandas.

The key columns are those that a table has besides the known ones, so that no kernel family is imported.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.core.data import is_plausible_time_us
from gemmpipe.core.errors import UserError, printable, quoted_repr, shortened
from gemmpipe.core.files import is_number, read_cells, suggest_path
from gemmpipe.core.paths import SELECTIONS as SELECTIONS_FILE
from gemmpipe.core.paths import shipped_tables
from gemmpipe.core.schema import DEVICE_COLUMNS, RESULT, SELECTIONS
from gemmpipe.report.last_run import LAST, find_finished, names_last
from gemmpipe.report.run_folder import INTERRUPTED, describe_run, nothing_timed, read_manifest, unended_text
from gemmpipe.tables.file_names import is_table_file
from gemmpipe.tables.merge import Row, used_rows
from gemmpipe.tables.store import COLUMN_ALIASES

SHIPPED = "shipped"
"""The name of the shipped table of the kernel that the other side has."""
ROWS_COLUMNS = ("M", "token")
"""The key columns with the rows of a product, by family."""

Key = tuple[tuple[str, str], ...]
"""The key columns of a product with their cells; columns without a value are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The choice for one product on one device."""

    key: Key
    gfx: str
    cu_num: str
    device: str
    """The device's product name; empty in older tables."""
    policy: str
    run_id: str
    backend: str
    config: str
    kernel_name: str
    time_us: float
    noise_pct: float | None
    """Half the width of the 95 % interval of a ratio of this choice's times, in percent; None without an interval."""

    @property
    def rows(self) -> int:
        """M; 0 for a key without it."""
        cells = dict(self.key)
        text = next((cells[name] for name in ROWS_COLUMNS if name in cells), "")
        return int(text) if text.isdecimal() else 0

    @property
    def winner(self) -> tuple[str, str]:
        """Backend and knobs; of a library without knobs its kernel's name."""
        return self.backend, self.config or self.kernel_name


_UNTIMED = ("", "inf", "+inf", "nan")
"""Values of `us`, in lower case, of rows without a time; numbers of at most 0 are as well."""


@dataclass(frozen=True, kw_only=True)
class ChoiceTable:
    """The choices of one side of a comparison."""

    name: str
    """As the user named it."""
    path: Path
    kernel: str
    """The kernel's name; empty for a table, whose file does not have it."""
    choices: tuple[Choice, ...]

    @functools.cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices of the rows, for a message."""
        return tuple(dict.fromkeys(choice.device or f"{choice.gfx}:{choice.cu_num}" for choice in self.choices))


def read_sides(before: str, after: str, command: str) -> tuple[ChoiceTable, ChoiceTable]:
    """The two sides of a comparison: runs, tables, `last`, `shipped`. Raises UserError naming the side."""
    if before == after == SHIPPED:
        raise UserError(f"{command}: shipped: twice; expected a run or a table on the other side")
    if before == SHIPPED:
        second = read_choices(after, command)
        return _shipped(second, command), second
    first = read_choices(before, command)
    return first, _shipped(first, command) if after == SHIPPED else read_choices(after, command)


def read_choices(name: str, command: str) -> ChoiceTable:
    """The choices of a run's folder, of `last` or `last~N`, or of a tuned table. Raises UserError."""
    path = Path(name).expanduser()
    if not names_last(name) and (path.is_file() or path.suffix == ".csv"):
        if not path.exists():
            expected = "expected a run, a table, 'last' or 'shipped'"
            raise UserError(f"{command}: {name}: no such file; {expected}{suggest_path(path)}")
        return ChoiceTable(name=name, path=path, kernel="", choices=tuple(_read_rows(path)))
    folder = find_finished(name, command, (LAST, SHIPPED))
    if not (folder / SELECTIONS_FILE).is_file():
        stopped = describe_run(folder).state == INTERRUPTED
        why = unended_text(folder) if stopped else "the run chose nothing; expected a run of tune"
        reason = nothing_timed(folder) or f"no {SELECTIONS_FILE}: {why}"
        raise UserError(f"{command}: {name}: {reason}")
    choices = tuple(_read_rows(folder / SELECTIONS_FILE))
    return ChoiceTable(name=name, path=folder, kernel=_kernel_of(folder), choices=choices)


def _kernel_of(folder: Path) -> str:
    config = read_manifest(folder).get("config")
    kernel = config.get("kernel") if isinstance(config, dict) else None
    family = kernel.get("family") if isinstance(kernel, dict) else None
    return printable(family) if isinstance(family, str) else ""


def _kernel_of_table(path: Path) -> str:
    """The kernel of a shipped table, by its name and columns."""
    from gemmpipe.report.tables import table_source

    return table_source(path, None).family.name


def _shipped(other: ChoiceTable, command: str) -> ChoiceTable:
    """The shipped table of the other side's kernel with most products in common, those of its device models first."""
    tables = sorted(shipped_tables().glob("*.csv"))
    named = {Path(name).name for name in (other.path.name, *_table_names(other))}
    of_name = [path for path in tables if any(is_table_file(path.name, name) for name in named)]
    of_kernel = of_name or [path for path in tables if not other.kernel or _kernel_of_table(path) == other.kernel]
    best: ChoiceTable | None = None
    most: tuple[int | bool, ...] = (0, 0, False)
    for path in of_kernel:
        choices = tuple(_read_rows(path))
        common = [_common(other.choices, choices, of_device=of_device) for of_device in (True, False)]
        rank = (*common, path.name in named)
        if rank > most:
            best, most = ChoiceTable(name=SHIPPED, path=path, kernel=other.kernel, choices=choices), rank
    if best is None:
        known = ", ".join(path.name for path in tables)
        kernel = other.kernel or other.path.name
        if other.kernel and of_kernel:
            names = ", ".join(path.name for path in of_kernel)
            raise UserError(f"{command}: shipped: {names} has no product in common with {other.name}; expected a path")
        raise UserError(f"{command}: shipped: no shipped table for {kernel}; expected one of {known}, or a path")
    return best


def _common(first: Sequence[Choice], second: Sequence[Choice], *, of_device: bool) -> int:
    sides = ({(choice.key, choice.device if of_device else "") for choice in side} for side in (first, second))
    return len(set.intersection(*sides))


def _table_names(other: ChoiceTable) -> list[str]:
    """Names that the table of a run's kernel may have: those of the files that it wrote, else its family's."""
    if not other.path.is_dir():
        return []
    files = read_manifest(other.path).get("files")
    names = [file for file in files if isinstance(file, str)] if isinstance(files, list) else []
    if not any(name.endswith(".csv") for name in names) and other.kernel:
        from gemmpipe.family import load_family, shipped_families

        if other.kernel in shipped_families():
            names.append(load_family(other.kernel).csv_name)
    return names


def _read_rows(path: Path) -> list[Choice]:
    """The timed rows of a tuned table or of a run's selections, without those of buckets.

    Of several rows of one key those that a look-up uses, as everywhere (`tables/merge.py`). Raises UserError for a file
    that is neither.
    """
    lines = read_cells(path)
    _, header = next(lines, (0, []))
    columns = [COLUMN_ALIASES.get(name.lower(), name) for name in header]
    if "us" not in columns or not {"libtype", "kernelName"} & set(columns):
        raise UserError(f"{path}: no columns 'us' and 'libtype'; expected a tuned table or a run's {SELECTIONS_FILE}")
    keys = key_columns(columns)
    if not keys:
        raise UserError(f"{path}: no key columns such as M, N, K; expected a tuned table or a run's {SELECTIONS_FILE}")
    found: list[tuple[Choice, Mapping[str, str]]] = []
    for number, cells in lines:
        if len(cells) != len(columns):
            raise UserError(f"{path}:{number}: {len(cells)} cells, expected {len(columns)} as in the header")
        row = dict(zip(columns, cells, strict=True))
        if not is_number(row["us"]) and row["us"].lower() not in _UNTIMED:
            raise UserError(f"{path}:{number}: column us: {quoted_repr(row['us'])}, expected microseconds")
        if not row.get("format") and is_number(row["us"]) and is_plausible_time_us(float(row["us"])):
            found.append((_choice(row, keys), row))
    return [choice for choice, _ in used_rows(found, _place, _typed_cells)]


def _place(found: tuple[Choice, Mapping[str, str]]) -> tuple[str, str, Key]:
    """The key with the architecture and its number of units: what rows of one file compete for."""
    choice, _ = found
    return choice.gfx, choice.cu_num, choice.key


def _typed_cells(found: tuple[Choice, Mapping[str, str]]) -> Row:
    """The results of a row as the rule compares them: numbers, texts, None for a blank cell."""
    _, row = found
    texts = {name: row.get(name, "") for name in RESULT}
    return {name: float(text) if is_number(text) else text or None for name, text in texts.items()}


def key_columns(columns: Sequence[str]) -> list[str]:
    """The key columns of a header: before the results in a tuned table, all unknown ones in a run's selections."""
    known = {*RESULT, *SELECTIONS, *DEVICE_COLUMNS}
    if "problem" in columns and "format" in columns:
        return [name for name in columns if name not in known]
    results = [index for index, name in enumerate(columns) if name in RESULT and name != "device"]
    return [name for name in columns[: min(results, default=0)] if name not in known]


def _choice(row: Mapping[str, str], keys: Sequence[str]) -> Choice:
    def text(name: str) -> str:
        return printable(shortened(row.get(name, ""), 1000))

    key = ((name, printable(row[name].removeprefix("torch."))) for name in keys if row[name])
    return Choice(
        key=tuple(sorted(key)),
        gfx=text("gfx"),
        cu_num=text("cu_num"),
        device=text("device"),
        policy=text("policy"),
        run_id=text("run_id"),
        backend=text("libtype"),
        config=text("config"),
        kernel_name=text("kernelName").partition("@")[0],
        time_us=float(row["us"]),
        noise_pct=_noise_pct(row),
    )


def _noise_pct(row: Mapping[str, str]) -> float | None:
    """The larger of the noise against the runner-up and half the interval of the ratio to the baseline.

    A choice that is its own baseline has the interval 1 to 1, which is no measurement.
    """
    noise, low, high = (_number(row.get(name, "")) for name in ("noise_pct", "ratio_low", "ratio_high"))
    found = [] if noise is None else [noise]
    if low is not None and high is not None and 0 < low < high:
        found.append(100 * (high - low) / (high + low))
    return max(found, default=None)


def _number(text: str) -> float | None:
    return float(text) if is_number(text) else None
