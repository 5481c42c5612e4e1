"""A run and a comparison in a notebook: a picture in the report's colours, without a script, light and dark."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import write_manifest, write_recorded_run

from gemmpipe.charts.style import SCOPE
from gemmpipe.report.choices import read_sides
from gemmpipe.report.data import RunData
from gemmpipe.report.diff import DiffRules, compare
from gemmpipe.report.html import render
from gemmpipe.report.notebook import MAX_SHAPES, difference_html, run_html
from gemmpipe.report.reading import read_run
from gemmpipe.report.tables import read_tables, table_source

NAME = "a8w8_blockscale_tuned_gemm.csv"
MAX_BYTES = 200_000
_STROKES = f"""() => Object.fromEntries([...document.querySelectorAll(".{SCOPE} path.line, figure path.line")].map(
    (line) => [line.dataset.name, getComputedStyle(line).stroke]))"""


@pytest.fixture(scope="module")
def table(h200_tables: Path) -> RunData:
    return read_tables([table_source(h200_tables / NAME, None)])


def _charts(html: str) -> list[str]:
    return re.findall(r'<svg [^>]*aria-label="([^"]*)"', html)


def test_a_run_shows_its_time_over_m_against_library_and_floor(table: RunData) -> None:
    html = run_html(table)
    assert len(html.encode()) < MAX_BYTES
    assert "<script" not in html
    assert " data-tip=" not in html
    charts = _charts(html)
    assert len(charts) == MAX_SHAPES
    assert all(name.startswith("time over M, ") for name in charts)
    assert set(re.findall(r'data-name="([^"]+)"', html)) == {"tuned", "best library", "floor"}
    left_out = table.products["shape"].nunique() - MAX_SHAPES
    assert f"{left_out} more shapes: .report() draws all" in html
    assert re.search(r"<title>M 64, \d+ x \d+: [^<]* us", html), "browsers show these texts themselves"


def test_all_rules_are_for_elements_of_the_picture(table: RunData) -> None:
    (style,) = re.findall("<style>(.*?)</style>", run_html(table), flags=re.DOTALL)
    selectors = [each for rule in re.findall(r"([^{}]+)\{", style) for each in rule.split(",")]
    assert len(selectors) > 50
    assert all(f".{SCOPE}" in selector for selector in selectors)


def test_products_of_one_m_show_their_speed_ups_or_times(table: RunData) -> None:
    one = table.products[table.products["rows"] == 64]
    assert _charts(run_html(replace(table, products=one))) == ["speed-up over the best library"]
    alone = one.assign(library="", speedup=None)
    assert _charts(run_html(replace(table, products=alone))) == ["times"]


def test_a_run_without_a_choice_has_no_picture(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1, candidates=0)
    write_manifest(tmp_path)
    html = run_html(read_run(tmp_path))
    assert "0 products of 1" in html
    assert not _charts(html)


def test_a_comparison_shows_the_changes(h200_tables: Path, tmp_path: Path) -> None:
    before, after = h200_tables / NAME, tmp_path / NAME
    rows = before.read_text().splitlines(keepends=True)
    names = rows[0].rstrip().split(",")
    cells = rows[1].split(",")
    cells[names.index("us")] = str(2 * float(cells[names.index("us")]))
    after.write_text("".join([rows[0], ",".join(cells), *rows[2:]]))
    found = compare(*read_sides(str(before), str(after), "diff"), DiffRules(across=True))
    assert found.counts["slower"] == 1
    html = difference_html(found)
    assert _charts(html) == ["time after over time before"]
    key = dict(zip(names, cells, strict=False))
    assert f">M {key['M']}, N {key['N']}, K {key['K']}" in html


@pytest.mark.slow  # the themes of a report are opened in a browser anyhow
def test_colours_are_those_of_the_report_in_light_and_dark_notebooks(
    browser: Any, table: RunData, tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_text(render(table))
    found = {}
    for theme, is_light in (("light", "true"), ("dark", "false")):
        colour = "#111" if is_light == "true" else "#ddd"
        notebook = tmp_path / f"{theme}.html"
        body = f'<body data-jp-theme-light="{is_light}" style="color:{colour}">{run_html(table)}'
        notebook.write_text(f'<!doctype html><meta charset="utf-8">{body}')
        strokes = []
        for path in (notebook, tmp_path / "report.html"):
            page = browser.new_page(viewport={"width": 900, "height": 900}, color_scheme=theme)
            messages: list[str] = []
            page.on("console", lambda message, to=messages: to.append(message.text))
            page.goto(path.as_uri())
            strokes.append(page.evaluate(_STROKES))
            assert messages == []
            assert page.evaluate("() => document.documentElement.scrollWidth") <= 900
            page.close()
        for name in ("tuned", "best library"):
            assert strokes[0][name] == strokes[1][name]
        found[theme] = strokes[0]
    assert found["light"]["floor"] == "rgb(17, 17, 17)", "the colour of the text around it"
    assert all(found["light"][name] != found["dark"][name] for name in ("tuned", "best library", "floor"))
