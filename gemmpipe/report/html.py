"""The report as one HTML file below a limit of bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gemmpipe import __version__
from gemmpipe.charts.colours import Colours
from gemmpipe.charts.page import Section, page
from gemmpipe.core.events import counted
from gemmpipe.core.paths import write_atomic
from gemmpipe.core.units import bytes_text
from gemmpipe.report.candidates import candidates_section, targets
from gemmpipe.report.data import TABLE, RunData
from gemmpipe.report.mix import mix_section
from gemmpipe.report.overview import data_device, summary, time_over_m, where_it_helps, winners
from gemmpipe.report.remains import not_done_section, provenance_section
from gemmpipe.report.search import knobs_section, search_section, space_section
from gemmpipe.report.trial_frame import ProblemTrials, by_problem
from gemmpipe.report.trust import conditions_section, near_ties_section, wall_section

MAX_BYTES = 2_000_000
"""The size of a page; less of a large run is shown if its page were larger."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of a large run is shown."""

    rows: int
    """Products, in every section."""
    shapes: int
    """Charts of time over M."""
    panels: int
    """Products with their candidates."""
    points: int
    """Candidates in a chart."""
    csv: int
    """Characters of the data behind one figure."""


_STEPS = (
    Limits(rows=2_000, shapes=120, panels=120, points=240, csv=200_000),
    Limits(rows=2_000, shapes=120, panels=120, points=80, csv=150_000),
    Limits(rows=2_000, shapes=80, panels=100, points=40, csv=120_000),
    Limits(rows=1_000, shapes=40, panels=40, points=40, csv=60_000),
    Limits(rows=400, shapes=24, panels=12, points=60, csv=30_000),
    Limits(rows=150, shapes=12, panels=4, points=40, csv=15_000),
    Limits(rows=50, shapes=6, panels=1, points=20, csv=5_000),
)


def render(data: RunData, *, refresh_s: int | None = None) -> str:
    """The page of a run or of tables, of at most MAX_BYTES. `refresh_s`: seconds until the browser loads it again."""
    parts = by_problem(data.trials)
    text = ""
    for limits in (each for each in _STEPS if each is _STEPS[-1] or _panels_bytes(parts, each) < MAX_BYTES):
        text = _page(_limited(data, limits), parts, limits, refresh_s)
        if len(text.encode()) <= MAX_BYTES:
            break
    return text


_PANEL_BYTES, _POINT_BYTES = 8_000, 110
"""The least size of a product's charts, and of a candidate in them, on the pages of runs on an H200."""


def _panels_bytes(parts: Mapping[str, ProblemTrials], limits: Limits) -> int:
    """The least size of the section of candidates: a page that cannot fit is not made."""
    counts = sorted(len(part.times_us()) for part in parts.values())[: limits.panels]
    return sum(_PANEL_BYTES + _POINT_BYTES * min(limits.points, count) for count in counts)


def write(data: RunData, path: Path, *, refresh_s: int | None = None) -> str:
    """Write the page; returns the line that tells the user. Raises EnvironmentProblem if the file cannot be written."""
    text = render(data, refresh_s=refresh_s)
    write_atomic(path, text)
    return f"report  {path} ({bytes_text(len(text.encode()))}, {counted(len(data.products), 'product')})"


def _limited(data: RunData, limits: Limits) -> RunData:
    """The data with at most `limits.rows` products, and a note of those left out."""
    from dataclasses import replace

    count = len(data.products)
    if count <= limits.rows:
        return data
    note = f"The page shows the first {limits.rows:,} of {count:,} products; all are in {data.origin}."
    return replace(data, products=data.products.head(limits.rows), notes=[*data.notes, note])


def _page(data: RunData, parts: Mapping[str, ProblemTrials], limits: Limits, refresh_s: int | None) -> str:
    colours = Colours()
    sections = list(_sections(data, parts, limits, colours))
    title = f"{data.family.name} on {data_device(data)}"
    footer = f"Written by gemmpipe {__version__}; one file without scripts or styles from elsewhere."
    return page(title, sections, state=_state_text(data, refresh_s), footer=footer, refresh_s=refresh_s)


def _state_text(data: RunData, refresh_s: int | None) -> str:
    source = "tuned tables" if data.state == TABLE else f"run, {data.run_text}"
    live = f"; this page is written again every {refresh_s} s" if refresh_s else ""
    started = f", started {data.started[:16].replace('T', ' ')} UTC" if data.started and data.state != TABLE else ""
    return f"{data.origin} ({source}{started}){live}"


def _sections(data: RunData, parts: Mapping[str, ProblemTrials], limits: Limits, colours: Colours) -> Iterator[Section]:
    """The sections with something to show, in order."""
    shown = targets(data, parts, limits.panels)
    found = (
        summary(data),
        where_it_helps(data, shown),
        time_over_m(data, colours, limits.shapes),
        candidates_section(data, parts, shown, colours, limits.points, limits.csv),
        search_section(data, parts, colours),
        knobs_section(data, parts),
        space_section(data, parts),
        near_ties_section(data, parts, colours),
        winners(data, colours),
        wall_section(data, colours),
        conditions_section(data, colours),
        mix_section(data, colours),
        not_done_section(data),
        provenance_section(data),
    )
    yield from (section for section in found if section is not None)
