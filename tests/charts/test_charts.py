"""Parts of charts: escaping, axes, colours, data."""

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from gemmpipe.charts.axes import CHAR_PX, Axis, linear_ticks, log_ticks, rows_axis, short_time, shown_labels, value_axis
from gemmpipe.charts.bars import horizontal_stacks, vertical_stacks
from gemmpipe.charts.colours import FLOOR, Colours, colour_classes, colour_rules, legend
from gemmpipe.charts.lines import Interval, Series, interval_chart, line_chart
from gemmpipe.charts.markup import csv_text, json_text, tag
from gemmpipe.charts.page import Data, Section, csv_link, page
from gemmpipe.charts.table_charts import Cell, heat_map, share_step, speedup_step

MS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)


def test_children_and_attributes_are_escaped() -> None:
    element = tag("p", "<b>", Markup("<i>ok</i>"), None, 3, data_tip='"><x', class_="a", hidden=False)
    assert element == '<p data-tip="&quot;&gt;&lt;x" class="a">&lt;b&gt;<i>ok</i>3</p>'


@given(st.text())
def test_json_never_ends_its_script_element(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert not set("<>&") & set(json_text({"a": text}))


def test_a_table_as_csv_has_no_formulas_and_no_missing_numbers() -> None:
    text = csv_text(("a", "b"), [("=1+1", math.nan), (None, -2.5), ('q"', 1e-9)])
    assert text == 'a,b\n\'=1+1,\n,-2.5\n"q""",1e-09\n'


def test_long_data_is_cut_at_a_row_with_a_note() -> None:
    data = Data(name="odd name/../x", header=("a",), rows=[[i] for i in range(100)])
    text = csv_link(data, limit=50)
    assert 'download="odd_name_x.csv"' in text
    assert "CSV (first 19 of 100 rows)" in text
    assert text.count("\\n") == 20


def test_ticks_of_m_are_at_the_ms_and_their_labels_apart() -> None:
    axis = rows_axis(MS).placed(58, 348)
    assert axis.ticks == MS
    labels = shown_labels(axis)
    assert {1.0, 4096.0} <= {tick for tick, _ in labels}
    assert len(labels) >= 6
    for (a, one), (b, other) in itertools.pairwise(labels):
        assert axis.at(b) - axis.at(a) >= (len(one) + len(other)) * CHAR_PX / 2


@given(st.floats(1e-6, 1e9), st.floats(1.0001, 1e6))
def test_axes_of_values_have_ticks_within(low: float, ratio: float) -> None:
    for log in (False, True):
        axis = value_axis([low, low * ratio], label="", text=short_time, log=log)
        assert axis.low <= low <= low * ratio <= axis.high * (1 + 1e-9)
        assert 1 <= len(axis.ticks) <= 12
    assert all(low * (1 - 1e-8) <= tick <= low * ratio * (1 + 1e-8) for tick in log_ticks(low, low * ratio))
    assert list(linear_ticks(low, low * ratio)) == sorted(linear_ticks(low, low * ratio))


def test_times_at_ticks_have_no_zeros_after_the_point() -> None:
    assert [short_time(us) for us in (50, 2.5, 1000, 0.5)] == ["50 us", "2.5 us", "1 ms", "500 ns"]


def test_a_name_has_one_colour_and_methods_of_a_backend_its_colour() -> None:
    colours = Colours()
    names = ["unknown", "torch mm", "triton", "torch float32_copy", "tuned", "other"]
    classes = {name: colours.css_class(name) for name in names}
    assert {name: colours.css_class(name) for name in reversed(names)} == classes
    assert len(set(classes.values())) == len(names)
    assert classes["torch mm"].split()[0] == classes["torch float32_copy"].split()[0]
    assert Colours().css_class("triton") == classes["triton"], "also on another page"
    light, dark = colour_rules()
    assert light.count(";") == dark.count(";") == colour_classes().count("{")


def test_colours_of_a_theme_have_contrast() -> None:
    """WCAG: at least 3 to 1 between marks and the background, which is white or #14171b."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for rules, background in zip(colour_rules(), ("#ffffff", "#14171b"), strict=True):
        for rule in rules.strip(";").split(";"):
            colour = rule.split(":")[1]
            one, other = sorted((luminance(colour), luminance(background)))
            assert (other + 0.05) / (one + 0.05) >= 2.5, (colour, background)


def test_points_without_a_value_are_left_out() -> None:
    line = Series(name="a", points=[(1, 2.0), (2, math.nan), (4, 3.0)], band=[(1, 1, 2), (4, math.nan, 3)])
    axis = rows_axis([1, 2, 4])
    text = line_chart([line], axis, value_axis([2, 3], label="y", text=str), Colours(), title="<t>")
    assert text.count("<circle") == 2
    assert "nan" not in text
    assert 'aria-label="&lt;t&gt;"' in text


@pytest.mark.parametrize("values", [[], [0.0], [1.0]])
def test_charts_of_little_data(values: list[float]) -> None:
    colours = Colours()
    stacks = [("x", {"a": value}) for value in values]
    assert "<svg" in horizontal_stacks(stacks, colours, title="t", label="s", unit="s")
    assert "<svg" in vertical_stacks(stacks, colours, title="t", label="n", x_label="M")
    rows = [Interval(label="r", name="a", value=value, low=None, high=None) for value in values]
    assert "<svg" in interval_chart(rows, value_axis(values, label="", text=str), colours, title="t", mark=1.0)
    assert "<svg" in line_chart([], rows_axis([]), value_axis([], label="", text=str, log=True), colours, title="t")


def test_heat_maps_have_a_step_per_value() -> None:
    assert [speedup_step(v) for v in (0.0, 1 / 3, 1, 3, 99)] == [0, 0, 5, 10, 10]
    assert [share_step(v) for v in (0.1, 0.4, 0.7, 1.0, 1.2)] == [0, 0, 5, 10, 10]
    cells = {1: Cell(value=2.0, text="2.00", target="product-1"), 4: Cell(value=9.0, text="9", pale=True)}
    text = heat_map([("a", cells)], [1, 2, 4], speedup_step, corner="c", kind="speedup", caption="d")
    assert '<td class="h8"><a href="#product-1">2.00</a></td><td class="none"></td><td class="pale">9</td>' in text


def test_a_page_escapes_its_texts() -> None:
    section = Section(id="a", title="<b>", body=legend(["<i>", FLOOR], Colours()), lead="<u>")
    text = page("<s>", [section], state="<q>", footer="<f>")
    assert not any(each in text for each in ("<b>", "<i>", "<u>", "<s>", "<q>", "<f>"))
    assert text.count("&lt;b&gt;") == 2


def test_the_band_of_a_stepped_line_is_stepped() -> None:
    """The limits hold until the next point, like the line: between points nothing is interpolated."""
    band = [(1.0, 1.0, 4.0), (2.0, 1.0, 2.0), (3.0, 1.0, 1.5)]
    axes = [Axis(low=1.0, high=4.0, label=""), Axis(low=1.0, high=4.0, label="")]
    for stepped, corners in ((True, 10), (False, 6)):
        line = Series(name="tuned", points=[(x, low) for x, low, _ in band], band=band, stepped=stepped)
        text = line_chart([line], *axes, Colours(), title="t")
        (path,) = re.findall(r'<path d="M([^"]*)Z"', text)
        assert len(path.split("L")) == corners
