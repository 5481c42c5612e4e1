"""`gemmpipe demo`: the default search on a recorded space of an H200, on any machine."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.cli import STDOUT, announced, naming_write_errors
from gemmpipe.cli.browser import may_open, open_page
from gemmpipe.cli.command_line import CommandLine
from gemmpipe.cli.commands import options
from gemmpipe.cli.run_list import is_true
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import REPORT
from gemmpipe.core.shell import shell_quote
from gemmpipe.core.text_table import Column, aligned, fold_width, terminal_width
from gemmpipe.core.units import duration_text, percent_text, speedup_text, time_text
from gemmpipe.report.lines import Line, fitted

if TYPE_CHECKING:
    from gemmpipe.pipeline.demo_run import Demo, ReplayedProduct

HELP = """gemmpipe demo [open=false] [folder=DIR]

Replays the default search on times that were recorded on an NVIDIA H200, writes the folder of a run
(outputs/demo/TIME) and its HTML report, and opens the report in a browser. It needs no GPU and takes seconds. Nothing
is measured on this machine; tables refuse its rows, and later runs do not learn from it.

  open=false       open no browser (the default without a terminal and a display)
  folder=DIR       write the run there; a folder that does not exist
"""
_DEFAULTS: Mapping[str, str] = {"open": "", "folder": ""}


def run(line: CommandLine) -> int:
    """Replay, print the results and the next commands. Raises UserError for a folder that exists."""
    given = options(line, _DEFAULTS)
    if line.flags:
        raise UserError(f"demo: {line.flags[0][0]}: no flag of this command; expected open=false")
    shown = may_open(is_true("open", given["open"]) if given["open"] else None)
    folder = Path(given["folder"]).expanduser() if given["folder"] else None
    if folder is not None and folder.exists():
        raise UserError(f"folder: {folder} exists; expected the name of a new folder")
    with announced("demo: a search is replayed on times that were recorded on an H200"):
        from gemmpipe.pipeline.demo_run import demo_folder, replay_demo

        folder = folder or demo_folder()
        demo = replay_demo(folder)
    with naming_write_errors(STDOUT):
        for text in lines(demo, terminal_width()):
            for part in fitted(Line(text=text), fold_width(sys.stdout)):
                print(part.text)
    with announced(f"demo: the report {folder / REPORT} is written"):
        report = write_report(folder)
    with naming_write_errors(STDOUT):
        print(f"report {report}")
    if shown:
        open_page(report)
    return 0


def lines(demo: "Demo", width: int) -> Iterator[str]:
    """The results in lines of at most `width` characters, the next commands last."""
    from gemmpipe.pipeline.demo_run import near_best

    products = demo.products
    timed, recorded = (sum(getattr(product, name) for product in products) for name in ("timed", "recorded"))
    near = near_best(products)
    yield f"demo: times recorded on an {demo.device} on {demo.recorded_on}; nothing is measured on this machine"
    yield f"{demo.family}: {len(products)} products, {recorded:,} configurations"
    seconds = [duration_text(each) for each in (demo.simulated_s, demo.wall_s)]
    share = f"{timed:,} configurations timed ({percent_text(timed / recorded)})"
    yield f"search {demo.search}: {share} in {seconds[0]} of recorded time, compilation included"
    yield f"replayed here in {seconds[1]}"
    yield f"within 1 % of the best configuration that was recorded: {near} of {len(products)} products"
    yield ""
    yield from aligned(_columns(products), width)
    yield ""
    folder = shell_quote(str(demo.folder))
    yield f"run    {demo.folder} (replayed: 'last' never names it)"
    yield f"see    gemmpipe show {folder}"
    yield "       (the choices; m=4 n=1280 k=8192 after it shows one product)"


def _columns(products: "Sequence[ReplayedProduct]") -> list[Column]:
    sizes = ("M", "N", "K")
    return [
        *(Column(title=name, cells=tuple(str(each.problem[name]) for each in products)) for name in sizes),
        Column(title="chosen", cells=tuple(time_text(each.chosen_us) for each in products)),
        Column(title="median", cells=tuple(time_text(each.median_us) for each in products), importance=2),
        Column(title="over median", cells=tuple(speedup_text(each.median_us / each.chosen_us) for each in products)),
        Column(
            title="behind the best",
            cells=tuple(percent_text(each.recorded_us / each.best_us - 1) for each in products),
            importance=3,
        ),
        Column(title="timed", cells=tuple(f"{each.timed:,} of {each.recorded:,}" for each in products), importance=1),
    ]


def write_report(folder: Path) -> Path:
    """The HTML report of a run, in its folder. Raises EnvironmentProblem if it cannot be written."""
    from gemmpipe.report import html
    from gemmpipe.report.reading import read_run

    page = folder / REPORT
    html.write(read_run(folder), page)
    return page
