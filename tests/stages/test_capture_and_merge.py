"""The two ends of the chain: capture skips tuned problems, merge writes every format."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from stage_contexts import stage_context

from gemmpipe.core.data import Device
from gemmpipe.core.errors import UserError
from gemmpipe.core.events import Event, Events
from gemmpipe.core.schema import SELECTIONS
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.formats.native import NativeCsv
from gemmpipe.formats.triton_json import TritonJson
from gemmpipe.sources.inline import InlineShapes
from gemmpipe.stages import Context
from gemmpipe.stages.capture import Capture
from gemmpipe.stages.merge import Merge


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def context(tmp_path: Path, blockscale: Family, no_words: KernelDefaults, h200: Device, events: list[Event]) -> Context:
    return stage_context(
        tmp_path,
        blockscale,
        no_words,
        h200,
        source=InlineShapes(items=[{"M": [1, 64], "N": 16, "K": 128, "weight": 3}]),
        formats=(
            ("csv", NativeCsv(file=None, sort=False)),
            ("triton_json", TritonJson(device_name=None, buckets="aiter")),
        ),
        events=Events(listeners=[events.append]),
        run_id="r1",
    )


def _selections(*rows: Mapping[str, object]) -> pd.DataFrame:
    base = {
        "format": "",
        "bucket": "",
        "gfx": "sm_90",
        "cu_num": 132,
        "libtype": "triton",
        "us": 4.5,
        "N": 16,
        "K": 128,
    }
    base |= {"config": '{"BLOCK_SIZE_M":16}', "policy": "p", "weight": 3.0}
    return pd.DataFrame([{**base, **row} for row in rows], columns=[*SELECTIONS, "M", "N", "K"])


def _captured_ms(context: Context) -> list[int]:
    assert Capture(cover_pct=100, include_tuned=False).run({}, context) == {}
    return [problem.rows for problem in context.problems]


def test_capture_skips_problems_that_merge_has_written(context: Context, events: list[Event]) -> None:
    assert _captured_ms(context) == [1, 64]
    assert [(p["N"], p["K"], p.weight) for p in context.problems] == [(16, 128, 3), (16, 128, 3)]
    bucket = {"format": "triton_json", "bucket": "small_M", "bucket_low": 0, "M": None}
    artifacts = Merge(device=None).run({"selections": _selections({"M": 1}, bucket)}, context)["artifacts"]
    assert [Path(path).name for path in artifacts["file"]] == [
        "smallblock_tuned_gemm.csv",
        "sm_90-GEMM-SMALLBLOCK-N=16-K=128.json",
        "sm_90-GEMM-SMALLBLOCK.json",
    ]
    assert all(Path(path).is_file() for path in artifacts["file"])
    assert _captured_ms(context) == [64]
    assert _captured_ms(replace(context, retune=True)) == [1, 64]
    assert [event.text for event in events if event.text.startswith("capture")] == [
        "capture: 2 problems of 1 product",
        "capture: 2 problems of 1 product, 1 already tuned (use retune=true to tune again)",
        "capture: 2 problems of 1 product",
    ]


def test_rows_of_other_devices_and_provisional_rows_do_not_count(context: Context) -> None:
    rows = ({"M": 1, "gfx": "gfx942", "cu_num": 304}, {"M": 64, "policy": "p shared_gpu"})
    Merge(device=None).run({"selections": _selections(*rows)}, context)
    assert _captured_ms(context) == [1, 64]
    shared = replace(context, device=replace(context.device, shared=True))
    assert _captured_ms(shared) == [1], "provisional rows are not replaced by provisional ones"


def test_rows_of_a_shared_cpu_are_kept_until_they_are_retuned(context: Context) -> None:
    rows = ({"M": 1, "policy": "p shared_cpu"}, {"M": 64, "policy": "p shared_cpu cut_short"})
    Merge(device=None).run({"selections": _selections(*rows)}, context)
    assert _captured_ms(context) == [64], "its search is continued"
    assert _captured_ms(replace(context, retune=True)) == [1, 64]


def test_a_broken_table_is_an_error_before_anything_is_timed(context: Context) -> None:
    context.output.mkdir()
    (context.output / "smallblock_tuned_gemm.csv").write_text("gfx,cu_num,M,N,K,us\nsm_90,132,1,x,3,4\n")
    with pytest.raises(UserError, match=r"smallblock_tuned_gemm.csv:2: column N: 'x'"):
        Capture(cover_pct=100, include_tuned=False).run({}, context)


def test_nothing_selected_writes_nothing(context: Context) -> None:
    assert Merge(device=None).run({"selections": _selections()}, context)["artifacts"].empty
    assert not context.output.exists()


def test_a_run_without_a_format_warns_before_anything_runs(context: Context, events: list[Event]) -> None:
    Merge(device=None).check(context)
    assert events == []
    Merge(device=None).check(replace(context, formats=()))
    assert [(event.kind, event.text) for event in events] == [
        ("warning", "format=[]: merge writes nothing; use format=[csv] for the tuned table")
    ]
