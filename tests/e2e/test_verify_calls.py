"""`gemmpipe verify` times rows as a program calls them: through the run time, from the table under test alone."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from gemmpipe.cli.main import main
from gemmpipe.core.device import cpu_device
from gemmpipe.family import load_family
from gemmpipe.stages.verify_report import VerifyReport, call_overhead, calls_summary, worst_calls
from gemmpipe.tables.store import render

pytestmark = pytest.mark.usefixtures("own_locks")

SLOW_US = 1e6
"""More than any candidate takes: a row that records this is never slower than recorded."""
LENIENT = (
    "stages.verify_report.max_behind_pct=1e6",
    "stages.verify_calls.timer.rounds=5",
    "stages.bench.timer.rounds=5",
)

Verify = Callable[..., tuple[int, str, dict[int, dict[str, object]]]]


def _row(family: str, m: int, libtype: str, knobs: dict[str, object], **key: object) -> dict[str, object]:
    here = cpu_device()
    place = {"gfx": here.gfx, "cu_num": here.cu_num, "M": m, "N": 256, "K": 512, **key}
    printed = {"libtype": libtype, "us": SLOW_US, "kernelName": libtype, "config": json.dumps(knobs)}
    return {**place, **printed, "policy": "host interleaved", "device": here.name}


def _plain(m: int, libtype: str, knobs: dict[str, object]) -> dict[str, object]:
    key = {"bias": False, "dtype": "bfloat16", "outdtype": "bfloat16", "scaleAB": False, "bpreshuffle": False}
    return _row("a16w16", m, libtype, knobs, **key)


def _scaled(m: int, method: str, order: str | None) -> dict[str, object]:
    key = {"dtype": "float8_e4m3fn", "outdtype": "bfloat16", "x_scale": order}
    return _row("a8w8_blockscale", m, "torch", {"method": method}, **key)


@pytest.fixture
def verify(folder: Path, capfd: pytest.CaptureFixture[str]) -> Verify:
    """Verifies a table of these rows; the exit code, what was printed, and `verified` by M."""

    def typed(family: str, *rows: dict[str, object], arguments: tuple[str, ...] = ()) -> object:
        Path("t.csv").write_text(render(rows, load_family(family), ()))
        capfd.readouterr()
        code = main(["verify", "table=t.csv", f"kernel={family}", "device=cpu", *LENIENT, *arguments])
        out = capfd.readouterr().out
        run = max(Path("outputs/runs/verify").glob("*"), key=lambda path: path.stat().st_mtime_ns)
        frame = pd.read_csv(run / "verified.csv").astype(object)
        told = {int(str(r["problem"]).split("M=")[1].split(" ")[0]): r for r in frame.to_dict("records")}
        return code, out, told

    return typed  # type: ignore[return-value]


@pytest.mark.e2e
def test_rows_are_timed_through_the_run_times_function(verify: Verify) -> None:
    rows = (_plain(32, "torch", {"method": "mm"}), _plain(64, "onednn", {"method": "float32_packed"}))
    code, out, told = verify("a16w16", *rows, arguments=("stages.verify_report.max_call_overhead_pct=1e6",))
    assert code == 0, out
    assert "called: 2 rows" in out
    # A CPU's calls contain the time of Python: they are told and held to no limit.
    assert re.search(r"; calls: at most [+-][\d.]+ % over their launch", out), out
    for row in told.values():
        assert 0 < float(str(row["called_us"])) < SLOW_US
        assert 0 < float(str(row["called_low"])) <= float(str(row["called_ratio"])) <= float(str(row["called_high"]))


@pytest.mark.slow
def test_a_row_for_a_layout_is_called_in_it_and_one_for_both_in_both(verify: Verify) -> None:
    rows = (_scaled(32, "bfloat16_convert", "column"), _scaled(48, "bfloat16_convert", None))
    code, out, told = verify("a8w8_blockscale", *rows, arguments=("stages.verify_report.max_call_overhead_pct=null",))
    assert code == 0, out
    assert told[32]["called_layout"] == "column"
    run = max(Path("outputs/runs/verify").glob("*"), key=lambda path: path.stat().st_mtime_ns)
    called = pd.read_csv(run / "called.csv")
    layouts = sorted((str(p).split("M=")[1].split(" ")[0], str(lay)) for p, lay in called[["problem", "layout"]].values)
    assert layouts == [("32", "column"), ("48", "column"), ("48", "row")]


@pytest.mark.e2e
def test_a_row_that_the_run_time_does_not_answer_with_is_told(verify: Verify) -> None:
    # A row below with the same key: merged tables have none, and the run time answers with the first.
    rows = (_plain(32, "torch", {"method": "mm"}), _plain(32, "onednn", {"method": "float32_packed"}))
    code, out, _ = verify("a16w16", *rows, arguments=("stages.verify_report.max_call_overhead_pct=null",))
    assert code == 1
    printed = "called: gemm_a16w16 launches torch method=mm (exact M=32 of"
    assert printed in out, out
    assert "not this row" in out


@pytest.mark.e2e
def test_a_resumed_verification_says_the_same(verify: Verify, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("stages.verify_report.max_call_overhead_pct=1e6",)
    _, before, _ = verify("a16w16", _plain(32, "torch", {"method": "mm"}), arguments=arguments)
    assert main(["resume=last"]) == 0
    line = before.partition("; calls")[2].splitlines()[0]
    assert f"; calls{line}" in capfd.readouterr().out


CALL = {
    "problem": "p",
    "candidate": "c",
    "layout": "column",
    "called_us": 5.0,
    "bound_us": 2.0,
    "called_ratio": 2.5,
    "called_low": 2.4,
    "called_high": 2.6,
    "called_error": "",
}


def test_what_comes_on_top_is_told_in_us_and_percent() -> None:
    printed = "gemm_x with M-major x_scale takes 5.00 us, 3.00 us more than the launch (+150.0 %, 3 allowed)"
    assert call_overhead(CALL, "gemm_x", 3) == printed
    assert call_overhead(CALL, "gemm_x", 200) == ""
    assert call_overhead(CALL, "gemm_x", None) == ""
    assert call_overhead({**CALL, "called_low": 0.9}, "gemm_x", 3) == "", "rounds that disagree prove nothing"


def test_the_worse_layout_counts_and_no_time_at_all_is_the_worst() -> None:
    rows = [{**CALL, "layout": "row", "called_ratio": 1.01}, CALL]
    assert worst_calls(pd.DataFrame(rows))["p", "c"]["layout"] == "column"
    failed = {**dict.fromkeys(CALL, math.nan), "problem": "p", "candidate": "c", "called_error": "no"}
    assert worst_calls(pd.DataFrame([*rows, failed]))["p", "c"]["called_error"] == "no"
    assert worst_calls(None) == {}


def test_the_share_of_rows_within_is_printed() -> None:
    ratios = [1.0, 1.02, 1.03, 1.5, None]
    text = calls_summary([{"called_ratio": ratio} for ratio in ratios], 3)
    assert text == "; calls: 3 of 4 within 3 % of their launch (75.0 %), +50.0 % at most"
    assert calls_summary([{"called_ratio": None}], 3) == ""


def test_less_than_nothing_cannot_be_allowed() -> None:
    with pytest.raises(ValueError, match="max_call_overhead_pct=-1, expected at least 0"):
        VerifyReport(max_drift_pct=1, max_behind_pct=1, max_call_overhead_pct=-1)
