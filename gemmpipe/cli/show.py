"""`gemmpipe show`: a run or a table again, or one of its products, without deciding or writing anything."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.cli import STDOUT, announced, naming_write_errors
from gemmpipe.cli.command_line import CommandLine
from gemmpipe.cli.commands import options
from gemmpipe.cli.run_list import is_true, whole_number
from gemmpipe.core.errors import UserError
from gemmpipe.core.files import suggest_path
from gemmpipe.core.text_table import terminal_width
from gemmpipe.report.last_run import LAST, find_finished, names_last
from gemmpipe.report.run_folder import is_run

if TYPE_CHECKING:
    from gemmpipe.report.data import RunData

HELP = """gemmpipe show [last|last~1|DIR|TABLE.csv] [KEY=VALUE ...] [candidates=20] [json=true]

Shows a run again: its figures, the choices of all products, the way through the space, the time of each resource, and
what is not done. `last` (the default) is the newest finished run with choices under outputs/runs, `last~1` the run
before it; a folder may also be of a run that is running or was killed. Nothing is decided or written.

  gemmpipe show last m=4 n=1280 k=8192     one product: its finals, and the fastest candidates of its search
  candidates=20                            the number of candidates of the search to list
  kernel=FAMILY                            the kernel of a table that has no known name
  json=true                                everything as JSON; of a product all trials
"""
_DEFAULTS: Mapping[str, str] = {"candidates": "20", "kernel": "", "json": "false"}
_OPTIONS = tuple(_DEFAULTS)


def run(line: CommandLine) -> int:
    """Print a run, a table or a product. Raises UserError for one that does not exist or cannot be read."""
    if line.flags:
        raise UserError(f"show: {line.flags[0][0]}: no flag of this command; expected KEY=VALUE or json=true")
    if len(line.paths) > 1:
        size = re.fullmatch(r"(\d+)x(\d+)x(\d+)", line.paths[1])
        product = "m={} n={} k={} for a product".format(*size.groups()) if size else ""
        expected = product or "one (gemmpipe diff A B compares two)"
        raise UserError(f"show: {line.paths[1]}: a second run; expected {expected}")
    own = [option for option in line.overrides if option.partition("=")[0] in _OPTIONS]
    wanted = _wanted([option for option in line.overrides if option not in own])
    given = options(replace(line, overrides=tuple(own)), _DEFAULTS)
    as_json, most = is_true("json", given["json"]), whole_number("candidates", given["candidates"])
    place = _place(line.paths[0] if line.paths else LAST, given["kernel"])
    with announced(f"show: reading {place}"):
        texts = _texts(_read(place, given["kernel"]), wanted, as_json=as_json, most=most)
    with naming_write_errors(STDOUT):
        for text in texts:
            print(text)
    return 0


def _wanted(arguments: list[str]) -> dict[str, str]:
    """The key columns of a product by name. Raises UserError for an argument without a value."""
    found = {}
    for argument in arguments:
        key, bound, value = argument.partition("=")
        if not bound or not value:
            raise UserError(f"show: {argument}: no value; expected {key}=VALUE, such as m=4")
        found[key] = value.strip("\"'")
    return found


def _place(name: str, kernel: str) -> Path:
    """The table or the folder of a run that is meant. Raises UserError if there is none."""
    path = Path(name).expanduser()
    if not names_last(name) and (path.is_file() or path.suffix == ".csv"):
        if not path.is_file():
            expected = "expected the folder of a run, a table, or 'last'"
            raise UserError(f"show: {name}: no such file; {expected}{suggest_path(path)}")
        return path
    if kernel:
        raise UserError("show: kernel: only a table takes it; a run names its kernel")
    return path if not names_last(name) and is_run(path) else find_finished(name, "show")


def _read(place: Path, kernel: str) -> "RunData":
    """The data of a run or a table. Raises UserError."""
    if place.is_file():
        from gemmpipe.report.tables import read_tables, table_source

        return read_tables([table_source(place, kernel or None)])
    from gemmpipe.report.reading import read_run

    return read_run(place)


def _texts(data: "RunData", wanted: Mapping[str, str], *, as_json: bool, most: int) -> list[str]:
    from gemmpipe.report import show_product, show_text

    if wanted:
        shown = show_product.find_product(data, wanted, _OPTIONS)
        if as_json:
            return [json.dumps(show_product.as_object(shown), indent=2, default=str)]
        return list(show_product.product_lines(shown, terminal_width(), most))
    if as_json:
        return [json.dumps(show_text.as_object(data), indent=2, default=str)]
    return list(show_text.run_lines(data, terminal_width()))
