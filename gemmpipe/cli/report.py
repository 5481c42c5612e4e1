"""`gemmpipe report`: the HTML report of runs and of tuned tables."""

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.cli import STDOUT, announced, naming_write_errors
from gemmpipe.cli.browser import may_open, open_page
from gemmpipe.cli.command_line import WATCH, CommandLine
from gemmpipe.cli.commands import options
from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.core.errors import UserError
from gemmpipe.core.files import suggest_path
from gemmpipe.core.paths import REPORT, RUNS
from gemmpipe.journal import NAME as JOURNAL
from gemmpipe.report.last_run import LAST, TO_WATCH, WITH_PRODUCTS, last_run, names_last, suggest_run
from gemmpipe.report.run_folder import RUNNING, describe_run, is_run

if TYPE_CHECKING:
    from gemmpipe.report.tables import TableSource

HELP = """gemmpipe report [last | RUN | TABLE.csv ...] [out=FILE.html] [watch=true] [kernel=FAMILY] [open=false]

Writes one HTML file, which needs no server and no network: speed-ups and shares of the floor by shape and M, times with
their spread, the candidates of each product, the search, the knobs that matter, the excluded configurations, near-ties,
wall time and the state of the device. It reads finished runs, the journal of one that still runs or was killed, and
tuned tables alone (with what they hold).

  last            the newest run with products, also while it runs; the default; last~1 is the run before it
  RUN             the folder of a run, or its name under outputs/runs
  TABLE.csv       a tuned table; several of one kernel become one report
  out=FILE        the file: RUN/report.html, or TABLE_report.html in this folder, unless given
  watch=true      (or --watch) writes the file again every few seconds until the run ends; the browser follows
  kernel=FAMILY   the kernel of a table whose name has none
  open=false      open no browser (the default without a terminal and a display, and for several reports)

In a run, `report=true` writes the report at its end, and opens it by the same rule.
"""
_DEFAULTS: Mapping[str, str] = {"out": "", "watch": "false", "kernel": "", "open": ""}
REFRESH_S = 5
"""Seconds between two versions of a watched report."""


def run(line: CommandLine) -> int:
    """Write the reports and print their paths. Raises UserError."""
    given = options(line, _DEFAULTS)
    watch = line.has(WATCH) or _is_true("watch", given["watch"])
    shown = may_open(_is_true("open", given["open"]) if given["open"] else None)
    for flag, _ in line.flags:
        if flag not in (WATCH, "--config-dir"):
            raise UserError(f"report: {flag}: no flag of this command; expected {WATCH} or --config-dir")
    folders = ConfigFolders(config_dir=line.config_dir)
    folders.make_importable()
    importable = folders.target_names()
    runs, tables = _sources(line.paths or (LAST,), watch=watch)
    out = Path(given["out"]).expanduser() if given["out"] else None
    if out is not None and out.is_dir():
        raise UserError(f"report: out={given['out']}: a folder; expected a file such as {out / REPORT}")
    if watch and (tables or len(runs) != 1):
        raise UserError("report: watch=true: expected one run")
    if watch:
        return _watch(runs[0], out, importable, shown=shown)
    with announced(f"report: reading {', '.join(map(str, tables))}") if tables else nullcontext():
        by_family = _by_family(tables, given["kernel"] or None, importable)
    if out is not None and len(by_family) + len(runs) != 1:
        raise UserError(f"report: out={out}: one file for several reports; expected one run, or tables of one kernel")
    for text, page in _reports(runs, by_family, out, importable):
        with naming_write_errors(STDOUT):
            print(text)
        if shown and len(by_family) + len(runs) == 1:
            open_page(page)
    return 0


def _reports(
    runs: list[Path], by_family: "dict[str, list[TableSource]]", out: Path | None, importable: frozenset[str]
) -> Iterator[tuple[str, Path]]:
    """Write each report; yields the line for the user, and the file."""
    for folder in runs:
        page = out or folder / REPORT
        with announced(f"report: reading {folder}"):
            from gemmpipe.report.html import write
            from gemmpipe.report.reading import read_run

            text = write(read_run(folder, importable=importable), page)
        yield text, page
    for sources in by_family.values():
        page = out or Path(f"{sources[0].path.stem}_report.html")
        with announced(f"report: writing {page}"):
            from gemmpipe.report.html import write
            from gemmpipe.report.tables import read_tables

            text = write(read_tables(sources), page)
        yield text, page


def _is_true(key: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UserError(f"report: {key}={text}: expected true or false")
    return text.lower() == "true"


def _sources(names: tuple[str, ...], *, watch: bool) -> tuple[list[Path], list[Path]]:
    """The folders of runs and the tables that the arguments name. Raises UserError."""
    runs, tables = [], []
    for name in names:
        path = Path(name).expanduser() if not name.startswith("~") or "/" in name else Path(name)
        if names_last(name):
            condition = TO_WATCH if watch else WITH_PRODUCTS
            runs.append(last_run(name, (condition,), f"report: {name}", "the folder of a run or a tuned table"))
        elif path.name == JOURNAL:
            runs.append(_run_folder(path.parent, name))
        elif path.is_file() or path.suffix == ".csv":
            if not path.is_file():
                expected = "expected a tuned table or the folder of a run"
                raise UserError(f"report: {name}: no such file; {expected}{suggest_path(path)}")
            tables.append(path)
        else:
            runs.append(_run_folder(path if path.exists() else RUNS / path, name))
    return list(dict.fromkeys(runs)), list(dict.fromkeys(tables))


def _run_folder(folder: Path, name: str) -> Path:
    """Raises UserError unless the folder is that of a run with a journal."""
    if not folder.is_dir():
        raise UserError(f"report: {name}: no such folder; expected a run, a tuned table or 'last'{suggest_run(name)}")
    if not (folder / JOURNAL).is_file():
        inner = sorted(path for path in folder.iterdir() if is_run(path))
        hint = f", such as {inner[0]}" if inner else ""
        raise UserError(f"report: {name}: no {JOURNAL} there; expected the folder of a run{hint}")
    return folder


def _by_family(tables: list[Path], kernel: str | None, importable: frozenset[str]) -> "dict[str, list[TableSource]]":
    """The tables of each kernel. Raises UserError for a name without one."""
    from gemmpipe.report.tables import TableSource, table_source

    found: dict[str, list[TableSource]] = {}
    for path in tables:
        source = table_source(path, kernel, importable)
        found.setdefault(source.family.name, []).append(source)
    return found


def _watch(folder: Path, out: Path | None, importable: frozenset[str], *, shown: bool) -> int:
    """Write the report of a run until the run ends; the last version is not loaded again by the browser.

    `shown`: open the first version in the browser.
    """
    path = out or folder / REPORT
    if describe_run(folder).state == RUNNING:
        with naming_write_errors(STDOUT):
            print(f"report  {path}: written every {REFRESH_S} s until the run ends", flush=True)
    from gemmpipe.report.html import write  # not above: they take a second
    from gemmpipe.report.reading import read_run

    is_written = False
    try:
        while describe_run(folder).state == RUNNING:
            if describe_run(folder).problems:
                write(read_run(folder, importable=importable), path, refresh_s=REFRESH_S)
                is_written = True
                if shown:
                    open_page(path)
                shown = False
            time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        if is_written:  # else an open browser loads it for ever
            write(read_run(folder, importable=importable), path)
        raise
    text = write(read_run(folder, importable=importable), path)
    with naming_write_errors(STDOUT):
        print(text)
    if shown:
        open_page(path)
    return 0
