"""Speed-ups as text: one value has the same digits and marks on every screen; what torch converts has none."""

import re
from dataclasses import replace
from pathlib import Path
from typing import cast

import pandas as pd
import pytest
from report_runs import write_manifest, write_recorded_run

from gemmpipe.family import load_family
from gemmpipe.report.data import RunData
from gemmpipe.report.html import render
from gemmpipe.report.product_table import product_frame
from gemmpipe.report.reading import read_run
from gemmpipe.report.results import product_results, run_figures
from gemmpipe.report.screen import RunFacts, choice_lines, memory_option_lines, screen_lines
from gemmpipe.report.show_text import as_object, not_done_lines, run_lines
from gemmpipe.report.speedup import conversion_reasons, no_gain_text, paired_text, shared_text
from gemmpipe.report.tables import read_tables, table_source
from gemmpipe.tables import store
from gemmpipe.tables.merge import Row

BLOCKSCALE = load_family("a8w8_blockscale")
KEY = {"N": 1280, "K": 8192, "dtype": "float8_e4m3fn", "outdtype": "bfloat16"}
DIRECT = {"baseline": "scaled_mm", "baseline_config": '{"use_fast_accum":false}', "libtype": "gluon"}
CONVERTED = {"baseline": "torch", "baseline_config": '{"method":"bfloat16_convert"}', "libtype": "torch"}
ALONE, SHARED = "host interleaved", "host interleaved shared_cpu"


def _row(m: int, us: float, library_us: float, **more: object) -> dict[str, object]:
    shared = {"format": "", "gfx": "sm_90", "cu_num": 132, "kernelName": "k@1", "config": "{}", "near_ties": 0}
    return {**shared, **KEY, "M": m, "us": us, "baseline_us": library_us, "policy": ALONE, **DIRECT, **more}


def _last_screen(rows: list[dict[str, object]]) -> list[str]:
    products = product_results(pd.DataFrame(rows), BLOCKSCALE)
    facts = RunFacts(kernel="a8w8_blockscale", shapes="", device="X", problems=len(rows), duration="done")
    lines = screen_lines(facts, run_figures(products), products, BLOCKSCALE)
    return [*choice_lines(products, BLOCKSCALE, 120), *(line.text for line in lines)]


def _table(rows: list[dict[str, object]], folder: Path) -> RunData:
    """The tuned table that a run writes with these rows, read for a report."""
    path = folder / "a8w8_blockscale_tuned_gemm.csv"
    path.write_text(store.render(cast("list[Row]", rows), BLOCKSCALE, ()))
    return read_tables([table_source(path, None)])


def _shown(rows: list[dict[str, object]], folder: Path) -> str:
    """`gemmpipe show` of that table."""
    return "\n".join(run_lines(_table(rows, folder), 140))


def test_a_speed_up_is_the_same_after_the_run_and_from_its_table(tmp_path: Path) -> None:
    # The middle of the interval is 1.28, the medians give 1.25, and the paired ratio is 1.27.
    rows = [_row(8, 80.0, 100.0, ratio=1 / 1.27, ratio_low=1 / 1.40, ratio_high=1 / 1.17)]
    screen = _last_screen(rows)
    assert sum("1.27x" in line for line in screen) == 2, "the row and the regime of M"
    shown = _shown(rows, tmp_path)
    assert shown.count("1.27x") >= 2
    assert "1.28x" not in shown
    assert "1.25x" not in shown


def test_a_table_without_the_ratio_has_the_middle_of_its_interval(tmp_path: Path) -> None:
    assert "1.28x" in _shown([_row(8, 80.0, 100.0, ratio_low=1 / 1.40, ratio_high=1 / 1.17)], tmp_path)


def test_speed_ups_from_a_shared_cpu_are_marked_on_every_screen(tmp_path: Path) -> None:
    rows = [_row(8, 50.0, 100.0, policy=SHARED), _row(16, 40.0, 100.0), _row(128, 50.0, 150.0)]
    screen = _last_screen(rows)
    assert [re.findall(r"\S+x(?= )", line)[-1] for line in screen[1:4]] == ["~2.0x", "2.50x", "3.00x"]
    (small,) = [line for line in screen if line.startswith("  M <= 64 ")]
    (large,) = [line for line in screen if line.startswith("  M 65 to 256 ")]
    assert " ~2.2x  (2.0x to 2.5x) " in small
    assert " 3.00x " in large
    printed = "~ approximate: 1 of 3 products timed while other processes used the device (shared_cpu)"
    assert f"  {printed}; retune=true repeats them" in screen
    shown = _shown(rows, tmp_path)
    assert "~2.0x" in shown
    assert "~2.2x" in shown
    assert printed in " ".join(shown.split())


def test_nothing_is_marked_where_each_row_was_timed_alone() -> None:
    assert "~" not in "".join(_last_screen([_row(8, 50.0, 100.0), _row(16, 50.0, 100.0, policy=None)]))
    assert shared_text([ALONE, None, ""]) == ""


def test_the_report_marks_and_rounds_as_the_screens_do(tmp_path: Path) -> None:
    page = render(_table([_row(8, 5.0, 90.44, policy=SHARED), _row(128, 5.0, 90.44)], tmp_path))
    assert page.count("~18x") >= 2, "the card and the table of choices"
    assert ">~18<" in page, "the heat map"
    assert ">18.1<" in page


def test_what_more_memory_gains_is_marked_too() -> None:
    row = {"problem": "a", "us": 10.0, "chosen_us": 100.0, "speedup": 10.0, "extra_weight_bytes": 8192}
    options = pd.DataFrame([{**row, "extra_weight_pct": 200, "shared": True}])
    assert "~10x" in memory_option_lines(options, 1, 100)[2]
    assert "~" not in memory_option_lines(options.assign(shared=False), 1, 100)[2]


@pytest.mark.parametrize(
    ("gfx", "m", "limit", "why", "change"),
    [
        ("cpu_avx512", 8, 200, "no library of a CPU multiplies float8_e4m3fn", "max_extra_weight_pct=200 keeps"),
        ("cpu_avx512", 7, None, "no library of a CPU", "tune on a GPU"),
        ("sm_90", 7, None, "with M a multiple of 4 only", "shapes.nsets="),
        ("gfx1100", 8, None, "no library of this device", "gemmpipe doctor"),
    ],
)
def test_what_torch_converts_has_a_reason_and_a_next_step(
    gfx: str, m: int, limit: int | None, why: str, change: str
) -> None:
    frame = product_frame([_row(m, 90.0, 90.0, **CONVERTED, gfx=gfx)], BLOCKSCALE)
    ((reason, step),) = conversion_reasons(frame.to_dict("records"), BLOCKSCALE, limit)
    assert reason.startswith("1 product: ")
    assert why in reason
    assert "with scales" in reason
    assert change in step


def test_an_m_is_not_the_reason_where_no_library_takes_the_operands_at_any_m() -> None:
    linear = load_family("linear_fp8_blockscale")
    frame = product_frame([_row(m, 90.0, 90.0, **CONVERTED) for m in (1, 8)], linear)
    ((reason, step),) = conversion_reasons(frame.to_dict("records"), linear, None)
    assert reason.startswith("2 products: no library of this device multiplies bfloat16 by float8_e4m3fn")
    assert step == "gemmpipe doctor"


def test_show_names_the_type_and_the_cpu_where_nothing_is_compared(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1)
    write_manifest(tmp_path)
    rows = [_row(8, 90.0, 90.0, **CONVERTED, gfx="cpu_avx512", config='{"method":"bfloat16_convert"}')]
    pd.DataFrame(rows).to_csv(tmp_path / "selections.csv", index=False)
    text = " ".join(" ".join(run_lines(read_run(tmp_path), 100)).split())
    assert "left by the run's budget" not in text
    assert "no library of a CPU multiplies float8_e4m3fn operands with scales as stored" in text
    assert "multiples of 4" not in text
    assert " 1.00x " not in text, "torch's conversion is not compared with itself"


def test_choices_that_gain_nothing_over_the_library_are_said() -> None:
    slower = _row(64, 106.0, 100.0, ratio=1.06, ratio_low=1.02, ratio_high=1.1)
    equal = _row(128, 101.0, 100.0, ratio=1.01, ratio_low=0.97, ratio_high=1.05)
    faster = _row(256, 90.0, 100.0, ratio=0.9, ratio_low=0.88, ratio_high=0.95)
    itself = _row(512, 100.0, 100.0, ratio=1.0, ratio_low=1.0, ratio_high=1.0)
    printed = "slower than the best library path, 1 not told apart from it (same rounds); retune=true times them again"
    assert f"  1 choice {printed}" in _last_screen([slower, equal, faster, itself])
    products = product_frame([slower, equal, faster, itself], BLOCKSCALE)
    assert no_gain_text(products.to_dict("records")) == f"1 choice {printed}".partition(";")[0]
    one = product_results(pd.DataFrame([equal, itself]), BLOCKSCALE).to_dict("records")
    assert no_gain_text(one) == "1 choice not told apart from the best library path (same rounds)"
    assert not any("library path (" in text and "choice" in text for text in _last_screen([faster, itself]))


def test_three_of_a_kind_of_what_is_not_done_are_listed(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1, candidates=5)
    data = replace(read_run(tmp_path), unsolved=[f"a8w8_blockscale M={m}" for m in range(1, 10)])
    what = "a product without a valid candidate"
    listed = [line.strip() for line in not_done_lines(data) if line.strip().startswith(what)]
    assert listed[:3] == [f"{what}: a8w8_blockscale M={m} (backend=[...] or a wider space)" for m in (1, 2, 3)]
    assert listed[3:] == [f"{what}: 6 more; json=true lists them"]
    assert len([row for row in as_object(data)["not_done"] if row["what"] == what]) == 9  # type: ignore[attr-defined]


def test_a_speed_up_that_the_times_beside_it_contradict_is_explained() -> None:
    even, uneven = _row(16, 10.0, 20.0, ratio=0.5), _row(64, 10.0, 20.0, ratio=0.6)
    assert paired_text(product_results(pd.DataFrame([even]), BLOCKSCALE).to_dict("records")) == ""
    rows = [even, uneven]
    assert paired_text(product_results(pd.DataFrame(rows), BLOCKSCALE).to_dict("records")).startswith(
        "1 speed-up differs"
    )
    assert any("1 speed-up differs from library / time" in line for line in _last_screen(rows))
