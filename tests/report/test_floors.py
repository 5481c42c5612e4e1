"""Floors of rows of several models of device, and what screens and pages say of rates that nobody measured."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from shipped_rows import SHIPPED_DEVICE, copy_rows

from gemmpipe.core.paths import shipped_tables
from gemmpipe.family import load_family
from gemmpipe.family.roofline import find_roofline, rooflines_of, shipped_rooflines
from gemmpipe.report import html
from gemmpipe.report.attention import records
from gemmpipe.report.data import RunData
from gemmpipe.report.product_table import product_frame
from gemmpipe.report.results import both_clocks_text, run_figures
from gemmpipe.report.screen import RunFacts, screen_lines
from gemmpipe.report.show_text import choice_lines, figure_lines
from gemmpipe.report.tables import read_tables, table_source

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import roofline_rates

BLOCKSCALE = load_family("a8w8_blockscale")
H100 = "NVIDIA H100 80GB HBM3"
DERIVED = "the floor's rates are derived from a specification, not measured"
KEY = {"M": 1, "N": 7168, "K": 18432, "dtype": "torch.float8_e4m3fn", "outdtype": "torch.bfloat16"}
ROW = {**KEY, "gfx": "sm_90", "libtype": "gluon", "us": 50.0}


@pytest.fixture
def tables(tmp_path: Path) -> RunData:
    """The block-scaled tables of both models, as one."""
    for model in (SHIPPED_DEVICE, H100):
        copy_rows(shipped_tables(), tmp_path, model)
    return read_tables([table_source(path, None) for path in sorted(tmp_path.glob("a8w8_blockscale*.csv"))])


def test_a_row_has_the_floor_of_the_model_that_it_names(tables: RunData) -> None:
    rates = shipped_rooflines()
    weight = 18432 * 7168
    for model, name in ((SHIPPED_DEVICE, "h200"), (H100, "h100")):
        rows = tables.products[tables.products["device"] == model].to_dict("records")
        [row] = [r for r in rows if (r["rows"], r["N"], r["K"]) == (1, 7168, 18432)]
        bytes_us = weight / rates[name].bytes_per_s * 1e6
        assert bytes_us < row["floor_us"] < 1.05 * bytes_us + (rates[name].launch_us or 0)
        assert row["share"] == row["floor_us"] / row["us"] < 1


def test_rows_that_name_no_model_or_another_have_no_floor() -> None:
    found = product_frame([ROW, {**ROW, "M": 2, "device": "NVIDIA H20"}, {**ROW, "M": 4, "device": H100}], BLOCKSCALE)
    assert {each["rows"]: each["share"] is not None for each in records(found)} == {1: False, 2: False, 4: True}


def test_a_run_of_before_has_the_rates_of_its_device() -> None:
    """Then an entry was an architecture's, with the rates of an H200."""
    node = {"bytes_per_s": 4.3e12, "flops_16_per_s": 8e14, "flops_8_per_s": 1.48e15, "launch_us": 0.55}
    rows = [{**ROW, "device": name} for name in (H100, "NVIDIA GH200 480GB")]
    found = product_frame(rows, BLOCKSCALE, {"roofline": {"sm_90": node}}).set_index("device")["floor_us"]
    assert found[H100] > 1.3 * found["NVIDIA GH200 480GB"]


def test_the_runs_own_rates_are_preferred() -> None:
    slow = {"device": H100, "bytes_per_s": 1e12, "flops_16_per_s": 1e15, "flops_8_per_s": 1e15}
    for name in ("h100", "mine"):
        [floor_us] = product_frame([{**ROW, "device": H100}], BLOCKSCALE, {"roofline": {name: slow}})["floor_us"]
        assert floor_us == pytest.approx(7168 * 18432 / 1e6, rel=0.01)


@pytest.mark.parametrize("measured", [True, False])
def test_derived_rates_are_named_wherever_a_floor_is_shown(tables: RunData, measured: bool) -> None:
    node = {"device": H100, "measured": measured, "bytes_per_s": 3e12, "flops_16_per_s": 8e14, "flops_8_per_s": 1e15}
    rows = [{**ROW, "device": SHIPPED_DEVICE}, {**ROW, "M": 2, "device": H100}]
    data = replace(tables, products=product_frame(rows, BLOCKSCALE, {"roofline": {"h100": node}}))
    facts = RunFacts(kernel="a8w8_blockscale", shapes="", device=H100, problems=2, duration="done in 1 s")
    screen = [line.text for line in screen_lines(facts, run_figures(data.products), data.products, data.family)]
    assert any("share of the floor" in line for line in screen)
    assert (f"  {DERIVED}" in screen) == (not measured)
    assert (DERIVED in figure_lines(data, 120)) == (not measured)
    assert ("rates are derived from a specification, not measured" in html.render(data)) == (not measured)


CLOCKS = "the times of 1 of 2 products are means of full and sustained clocks"


@pytest.mark.parametrize("word", ["both_clocks", "dependent"])
def test_means_of_both_clocks_are_named_wherever_times_are_shown(tables: RunData, word: str) -> None:
    rows = [{**ROW, "policy": f"graph {word}"}, {**ROW, "M": 2, "policy": "graph"}]
    conditions = [{"device": "cuda:0", "t_s": 1.0, "sm_mhz": clock} for clock in (1980.0, 1200.0)]
    data = replace(tables, products=product_frame(rows, BLOCKSCALE, {}), conditions=conditions)
    facts = RunFacts(kernel="a8w8_blockscale", shapes="", device=H100, problems=2, duration="done in 1 s")
    screen = [line.text for line in screen_lines(facts, run_figures(data.products), data.products, data.family)]
    both = word == "both_clocks"
    assert (f"  {CLOCKS}" in screen) == both
    assert (f"({CLOCKS})" in choice_lines(data, 120)) == both
    assert ("are means of full and sustained clocks" in html.render(data)) == both
    [clock] = [line for line in figure_lines(data, 120) if "The clock of the device fell" in line]
    assert clock.endswith("power limit are timed under load too.") == both
    assert both_clocks_text(["graph both_clocks"]) == "the time is the mean of full and sustained clocks"


def test_the_benchmark_writes_an_option() -> None:
    rates = roofline_rates.Rates(
        bytes_per_s=3.01e12,
        bytes_words="copy: 3.01e+12",
        flops_16_per_s=8.1e14,
        flops_16_words="in bursts (1980 MHz)",
        flops_8_per_s=1.5e15,
        flops_8_words="in bursts",
        launch_us=0.5612,
    )
    text = roofline_rates.yaml_text("h100", H100, rates, "torch 2.11.0, triton 3.6.0", "2026-11-26")
    found = find_roofline("sm_90", H100, rooflines_of({"roofline": yaml.safe_load(text)}))
    assert found is not None
    assert found.measured
    assert (found.bytes_per_s, found.launch_us) == (3.01e12, 0.56)
    assert (found.flops_16_per_s, found.flops_8_per_s) == (8.1e14, 1.5e15)
    assert found.source == "NVIDIA H100 80GB HBM3, torch 2.11.0, triton 3.6.0; CUDA graphs"


@pytest.mark.parametrize(
    ("device", "gfx", "name"),
    [
        (H100, "sm_90", "h100"),
        ("NVIDIA H200", "sm_90", "h200"),
        ("NVIDIA GH200 480GB", "sm_90", "gh200"),
        ("AMD Instinct MI300X", "gfx942", "mi300x"),
        ("AMD Radeon Graphics", "gfx942", "gfx942"),
    ],
)
def test_the_benchmark_names_an_entry_by_the_model(device: str, gfx: str, name: str) -> None:
    assert roofline_rates.entry_name(device, gfx) == name
