"""Routings of a running mixture of experts: counted, read as a source, and rows tuned on them at run time."""

import json
from pathlib import Path

import pytest
import torch

from gemmpipe.core.device import cpu_device
from gemmpipe.core.errors import UserError
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.runtime import fused_moe, reload
from gemmpipe.runtime.capture.recorder import recorder_for
from gemmpipe.runtime.capture.routing import routing_counter
from gemmpipe.runtime.selection_log import LOG
from gemmpipe.runtime.tables import load_tables
from gemmpipe.sources.routing_counts import LayerSizes, profiles, read_counts, routing_file
from gemmpipe.sources.table import CsvShapes
from gemmpipe.tables.store import render

FMOE = load_family("fmoe")
DEFAULTS = KernelDefaults(dtype=None, out_dtype=None, bias=None)
SIZES = (64, 32, 4, 2)


def call(ids: list[list[int]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    rows = len(ids)
    x = torch.randn(rows, 64, generator=generator).bfloat16()
    w1, w2 = torch.randn(4, 64, 64, generator=generator), torch.randn(4, 64, 32, generator=generator)
    with torch.no_grad():
        shares = torch.full((rows, 2), 0.5)
        return fused_moe(x, w1.bfloat16(), w2.bfloat16(), shares, torch.tensor(ids, dtype=dtype))


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "seen.csv"
    monkeypatch.setenv("GEMMPIPE_CAPTURE", str(path))
    reload()
    return path


def flush(path: Path) -> None:
    recorder_for(path).flush()
    routing_counter(path).flush()


def test_what_was_captured_is_what_is_tuned_on(captured: Path) -> None:
    call([[0, 1], [0, 2], [0, 1]])
    flush(captured)
    assert read_counts(routing_file(captured)) == {LayerSizes(sizes=SIZES, layer=""): [3, 2, 1, 0]}
    call([[0, 3]] * 2, torch.int64)  # another run adds to the file
    flush(captured)
    flush(captured)  # without calls since
    assert read_counts(routing_file(captured)) == {LayerSizes(sizes=SIZES, layer=""): [5, 2, 1, 2]}
    profile = "2/0.8/0.8/0.4"
    assert profiles(captured) == {SIZES: profile}
    source = CsvShapes(path=str(captured), rows_of=None)
    problems = source.problems(FMOE, DEFAULTS, "sm_90")
    assert [(p["token"], p["routing"]) for p in problems] == [(3, profile), (2, profile)]
    busiest = "busiest of 4 experts 2 times the mean"
    expected = f"routing as captured (seen.routing.csv): {busiest}; kernel.key.routing= sets another"
    assert source.assumed("sm_90") == expected
    asked = KernelDefaults(dtype=None, out_dtype=None, bias=None, key={"routing": "uniform"})
    assert {p["routing"] for p in source.problems(FMOE, asked, "sm_90")} == {"uniform"}
    assert source.assumed("sm_90") == ""
    routing_file(captured).unlink()
    assert {p["routing"] for p in source.problems(FMOE, DEFAULTS, "sm_90")} == {None}


def test_experts_of_another_rank_are_not_counted(captured: Path) -> None:
    counter = routing_counter(captured)
    counter.add(torch.tensor([[0, -1], [3, 7]]), SIZES, "layers.0.mlp")
    counter.add(torch.tensor([[1, 1]]), SIZES, "layers.1.mlp")
    counter.flush()
    found = read_counts(routing_file(captured))
    assert {each.layer: counts for each, counts in found.items()} == {
        "layers.0.mlp": [1, 0, 0, 1],
        "layers.1.mlp": [0, 2, 0, 0],
    }


def test_a_forked_process_drops_its_parents_counts(captured: Path) -> None:
    counter = routing_counter(captured)
    counter.add(torch.tensor([[0, 1]]), SIZES, "")
    counter.reset()
    counter.flush()
    assert not routing_file(captured).exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer,counts\n", r"seen\.routing\.csv:1: expected the columns model_dim, inter_dim, expert, topk, layer"),
        ("model_dim,inter_dim,expert,topk,layer,counts\n64,32,4,2,,1 2 3\n", r"csv:2: 3 counts, expected one for each"),
        ("model_dim,inter_dim,expert,topk,layer,counts\n64,32,4,2,,1 2 3 x\n", r"csv:2: 'x', expected a whole number"),
    ],
)
def test_a_file_of_something_else_is_one_line(captured: Path, text: str, message: str) -> None:
    routing_file(captured).write_text(text)
    with pytest.raises(UserError, match=message):
        profiles(captured)


def test_rows_tuned_on_a_routing_answer_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = cpu_device()
    sizes = {"token": 3, "model_dim": 64, "inter_dim": 32, "expert": 4, "topk": 2}
    rows = []
    for routing, method in ((None, "expert_loop"), ("2/0.8/0.8/0.4", "expert_loop_float32")):
        key = dict(make_problem(FMOE, {**sizes, "routing": routing}, DEFAULTS, device.gfx, "test").key)
        row = {"gfx": device.gfx, "cu_num": device.cu_num, **key, "libtype": "torch", "us": 1.0}
        rows.append({**row, "config": json.dumps({"method": method})})
    path = tmp_path / "tuned_fmoe.csv"
    for kept, method in ((rows, "expert_loop_float32"), (rows[:1], "expert_loop")):
        path.write_text(render(kept, FMOE, ()))
        assert ("routing" in path.read_text().splitlines()[0]) == (len(kept) == 2)
        monkeypatch.setenv("GEMMPIPE_CONFIG_FMOE", str(path))
        LOG.clear()
        reload()
        call([[0, 1]] * 3)
        assert set(LOG.steps.values()) == {"exact"}
        from gemmpipe.runtime.dispatch import dispatch_of

        found = (
            dispatch_of("fmoe")
            .tables()
            .find(device, [None if c.condition else rows[0][c.name] for c in FMOE.key_columns])
        )
        assert json.loads(str(found[0].row["config"])) == {"method": method}


@pytest.mark.parametrize(
    ("routings", "order", "used"),
    [
        (["one_hot", "uniform", "skewed", None], [None, "uniform", "one_hot", "skewed"], "without one"),
        (["one_hot", "skewed", "uniform"], ["uniform", "one_hot", "skewed"], "of uniform"),
        (["skewed", "one_hot"], ["skewed", "one_hot"], "that comes first"),
        ([None, "one_hot"], ["one_hot", None], ""),
    ],
)
def test_the_order_of_rows_of_several_routings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    routings: list[str | None],
    order: list[str | None],
    used: str,
) -> None:
    device = cpu_device()
    sizes = {"token": 3, "model_dim": 64, "inter_dim": 32, "expert": 4, "topk": 2}
    rows = []
    for routing in routings:
        key = dict(make_problem(FMOE, {**sizes, "routing": routing}, DEFAULTS, device.gfx, "test").key)
        row = {"gfx": device.gfx, "cu_num": device.cu_num, **key, "libtype": "torch", "us": 1.0}
        rows.append({**row, "config": json.dumps({"method": "expert_loop"})})
    path = tmp_path / "tuned_fmoe.csv"
    path.write_text(render(rows, FMOE, ()))
    monkeypatch.setenv("GEMMPIPE_CONFIG_FMOE", str(path))
    with caplog.at_level("WARNING"):
        found = load_tables(FMOE).find(device, [None if c.condition else rows[0][c.name] for c in FMOE.key_columns])
    assert [each.row["routing"] for each in found[: len(rows)]] == order
    warnings = [record.getMessage() for record in caplog.records if "several" in record.getMessage()]
    assert len(warnings) == bool(used)
    for warning in warnings:
        assert f"1 key of {path} has rows of several values of routing; calls use the row {used} (" in warning
