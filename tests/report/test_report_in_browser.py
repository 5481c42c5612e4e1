"""The report in a browser: no error, every section, colours of lines as in the legend, both themes, a narrow page."""

from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE, SECTIONS, rewrite_journal, write_manifest, write_recorded_run

from gemmpipe.report.html import render
from gemmpipe.report.reading import read_run
from gemmpipe.report.tables import read_tables, table_source

pytestmark = pytest.mark.e2e

_COLOURS = """() => [...document.querySelectorAll("svg [data-name], svg[data-name]")].map((mark) => {
    const drawn = mark.matches("path, line, circle, rect") ? mark : mark.querySelector("path, line, circle, rect");
    if (!drawn) return null;
    const style = getComputedStyle(drawn);
    return [mark.dataset.name, style.fill === "none" ? style.stroke : style.fill];
}).filter(Boolean)"""
"""Pairs of the name and the drawn colour of every mark: lines, dots, bars and the squares of legends."""
_LEGENDS = """() => [...document.querySelectorAll(".legend svg")].map((mark) => [
    mark.dataset.name, getComputedStyle(mark.firstElementChild)[mark.querySelector("line") ? "stroke" : "fill"]])"""


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_recorded_run(folder)
    write_manifest(folder)
    path = folder / "report.html"
    path.write_text(render(read_run(folder)))
    return path


@pytest.fixture(scope="module")
def table_page(h200_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "report.html"
    table = table_source(h200_tables / "a8w8_blockscale_tuned_gemm.csv", None)
    path.write_text(render(read_tables([table])))
    return path


def _open(browser: Any, path: Path, width: int = 1400, scheme: str = "light") -> tuple[Any, list[str]]:
    """The loaded page, and a list that gets the messages of its console and its errors."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("dialog", lambda dialog: (messages.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.goto(path.as_uri())
    return page, messages


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_a_run_shows_every_section_without_an_error(browser: Any, run_page: Path, scheme: str) -> None:
    page, messages = _open(browser, run_page, scheme=scheme)
    shown = page.evaluate(
        "() => [...document.querySelectorAll('section')].filter(s => s.offsetHeight > 40).map(s => s.id)"
    )
    assert set(shown) >= SECTIONS - {"space"}
    assert messages == []
    page.close()


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_lines_have_the_colours_of_the_legend(browser: Any, run_page: Path, table_page: Path, scheme: str) -> None:
    for path in (run_page, table_page):
        page, _ = _open(browser, path, scheme=scheme)
        legends = page.evaluate(_LEGENDS)
        by_name = dict(legends)
        assert {"tuned", "floor"} <= set(by_name)
        for name, colour in page.evaluate(_COLOURS):
            assert by_name.get(name, colour) == colour, name
        assert all(by_name[name] == colour for name, colour in legends), "a name has one colour in every legend"
        page.close()


@pytest.mark.slow
def test_the_themes_differ_and_the_switch_changes_them(browser: Any, table_page: Path) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    light, _ = _open(browser, table_page)
    dark, _ = _open(browser, table_page, scheme="dark")
    assert light.evaluate(background) != dark.evaluate(background)
    for expected in ("light", "dark", "auto"):
        light.click("#theme")
        assert light.inner_text("#theme") == f"theme: {expected}"
        assert (light.evaluate(background) == dark.evaluate(background)) is (expected == "dark")
    light.close()
    dark.close()


@pytest.mark.parametrize("width", [400, pytest.param(1400, marks=pytest.mark.slow)])
def test_nothing_is_wider_than_the_page(browser: Any, run_page: Path, table_page: Path, width: int) -> None:
    for path in (run_page, table_page):
        page, messages = _open(browser, path, width=width)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        assert messages == []
        page.close()


@pytest.mark.slow
def test_tables_of_knobs_show_all_columns(browser: Any, run_page: Path) -> None:
    """At each number of tables side by side; 800 and 1200 leave the least room for a table."""
    page, _ = _open(browser, run_page)
    for width in (400, 500, 800, 1200, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        widths = page.evaluate(
            "() => [...document.querySelectorAll('#knobs .scroll')].map((each) => [each.scrollWidth, each.clientWidth])"
        )
        assert len(widths) > 1
        assert all(needed <= given for needed, given in widths), width
    page.close()


@pytest.mark.slow
def test_the_steps_of_the_space_are_not_cut_on_a_narrow_page(browser: Any, run_page: Path) -> None:
    page, _ = _open(browser, run_page, width=400)
    widths = "() => [...document.querySelectorAll('.funnel')].map(f => [f.scrollWidth, f.parentElement.clientWidth])"
    ((needed, given),) = page.evaluate(widths)
    assert needed <= given
    page.close()


@pytest.mark.slow
def test_labels_of_an_axis_do_not_overlap(browser: Any, table_page: Path) -> None:
    page, _ = _open(browser, table_page)
    overlaps = page.evaluate(
        """() => [...document.querySelectorAll("svg.chart")].flatMap((chart) => {
            const boxes = [...chart.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
            return boxes.flatMap(([a, p], i) => boxes.slice(i + 1)
                .filter(([b, q]) => p.left < q.right && q.left < p.right
                    && p.top + 2 < q.bottom && q.top + 2 < p.bottom)
                .map(([b]) => `${chart.getAttribute("aria-label")}: ${a} and ${b}`));
        })"""
    )
    assert overlaps == []
    page.close()


def test_a_product_is_chosen_by_a_cell_and_by_the_list(browser: Any, run_page: Path) -> None:
    page, messages = _open(browser, run_page)
    shown = "() => [...document.querySelectorAll('[data-product]')].filter(p => !p.hidden).map(p => p.id)"
    assert page.evaluate(shown) == ["product-0"]
    page.click('table.heat a[href="#product-2"]')
    assert page.evaluate(shown) == ["product-2"]
    page.select_option("#product", "product-1")
    assert page.evaluate(shown) == ["product-1"]
    assert messages == []
    page.close()


def test_data_is_downloaded_and_the_slider_mixes(browser: Any, table_page: Path, tmp_path: Path) -> None:
    page, messages = _open(browser, table_page)
    with page.expect_download() as download:
        page.click('a[data-csv="csv-speedup"]')
    download.value.save_as(tmp_path / "speedup.csv")
    assert download.value.suggested_filename == "speedup.csv"
    assert (tmp_path / "speedup.csv").read_text().startswith("problem,M,shape,")
    texts = []
    for value in (0, 100):
        page.fill("#mix", str(value))
        texts.append(page.inner_text("#mix-result"))
    assert all(text.endswith("less time") for text in texts)
    assert texts[0] != texts[1]
    assert messages == []
    page.close()


def test_hostile_names_run_nothing(browser: Any, tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=2)
    rewrite_journal(tmp_path, "GPU-0", f"GPU{HOSTILE}".replace('"', '\\"'))
    rewrite_journal(tmp_path, "num_warps", f"n{HOSTILE}".replace('"', '\\"'))
    write_manifest(tmp_path, unsolved=[HOSTILE], overrides=[HOSTILE], files=[HOSTILE])
    path = tmp_path / "report.html"
    path.write_text(render(read_run(tmp_path)))
    page, messages = _open(browser, path)
    page.hover("circle[data-tip]")
    assert "<img" in page.inner_text("body"), "it is shown as text"
    assert page.query_selector("img") is None
    assert messages == []
    page.close()
