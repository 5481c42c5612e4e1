"""Rows for one order of x's block scales: the row of a call, and the order in a capture."""

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gemmpipe.core.device import cpu_device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.runtime import gemm_a8w8_blockscale, reload
from gemmpipe.runtime.dispatch import EAGER
from gemmpipe.runtime.operands import memory_orders
from gemmpipe.runtime.selection_log import LOG
from gemmpipe.sources.table import CsvShapes
from gemmpipe.tables.store import read, render

NAME = "a8w8_blockscale"
FAMILY = load_family(NAME)
M, N, K = 8, 128, 256
Call = Callable[[str, int], torch.Tensor]
METHODS = {"row": "bfloat16_convert", "column": "float32_convert", None: "bfloat16_copy"}
"""The method of each order's row, which identifies the row."""


def _row(order: str | None, m: int = M) -> dict[str, object]:
    device = cpu_device()
    key = {"M": m, "N": N, "K": K, "dtype": "float8_e4m3fn", "outdtype": "bfloat16", "x_scale": order}
    config = json.dumps({"method": METHODS[order]})
    return {"gfx": device.gfx, "cu_num": device.cu_num, **key, "libtype": "torch", "us": 1.0, "config": config}


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    def write(*rows: dict[str, object]) -> Path:
        path = tmp_path / "t.csv"
        path.write_text(render(rows, FAMILY, ()))
        monkeypatch.setenv("GEMMPIPE_CONFIG_A8W8_BLOCKSCALE", str(path))
        monkeypatch.setenv("GEMMPIPE_LOG_SELECTION", "1")
        reload()
        return path

    return write


def _operands(order: str, m: int = M) -> tuple[torch.Tensor, ...]:
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = FAMILY.spec(make_problem(FAMILY, {"M": m, "N": N, "K": K}, defaults, "cpu_avx2", "test"))
    generator = torch.Generator().manual_seed(1)
    inputs, weights = FAMILY.make_inputs(spec, generator), FAMILY.make_weights(spec, generator)
    scale = inputs.x_scale if order == "row" else inputs.x_scale.mT.contiguous().mT
    return inputs.x, weights.w, scale, weights.w_scale


def _method(caplog: pytest.LogCaptureFixture, order: str, m: int = M) -> str:
    """The method of the selected candidate."""
    caplog.clear(), LOG.clear()
    with caplog.at_level(logging.INFO, "gemmpipe.runtime"):
        gemm_a8w8_blockscale(*_operands(order, m))
    (message,) = [each.getMessage() for each in caplog.records if "torch method=" in each.getMessage()]
    return message.partition("method=")[2].split()[0]


def test_a_row_for_the_calls_own_layout_comes_before_one_for_both(
    tables: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    tables(_row("column"), _row(None))
    assert [_method(caplog, order) for order in ("row", "column")] == [METHODS[None], METHODS["column"]]
    tables(_row("column"), _row("row"), _row(None))
    assert [_method(caplog, order) for order in ("row", "column")] == [METHODS["row"], METHODS["column"]]
    tables(_row(None))
    assert _method(caplog, "column") == METHODS[None]


def test_a_call_stays_with_its_layout(tables: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    tables(_row("column"), _row("row"))
    expected = gemm_a8w8_blockscale(*_operands("row"))
    with caplog.at_level(logging.INFO, "gemmpipe.runtime"):
        for order in ("column", "row", "column"):
            torch.testing.assert_close(gemm_a8w8_blockscale(*_operands(order)), expected, atol=0.02, rtol=0.02)
    message = [each.getMessage() for each in caplog.records if "torch method=" in each.getMessage()]
    assert len(message) == 2, "each layout is looked up once"
    assert [text.split(":")[1].rpartition(" ")[2] for text in message] == ["x_scale=row", "x_scale=column"]


def test_new_rows_answer_calls_that_had_none(tables: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    """A call without a row is looked up again after new tables, though its scales' strides are known."""
    path = tables(_row("column"))
    operands = {order: _operands(order) for order in ("row", "column")}
    for _ in range(3):
        for each in operands.values():
            gemm_a8w8_blockscale(*each)
    path.write_text(render((_row("column"), _row("row")), FAMILY, ()))
    assert EAGER[NAME].reload_tables() == 1
    caplog.clear()
    with caplog.at_level(logging.INFO, "gemmpipe.runtime"):
        for _ in range(2):
            gemm_a8w8_blockscale(*operands["row"])
    (message,) = [each.getMessage() for each in caplog.records if "method=" in each.getMessage()]
    assert METHODS["row"] in message


def test_one_row_of_scales_has_both_layouts(tables: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    tables(_row("column", 1), _row(None, 1))
    assert _method(caplog, "row", 1) == METHODS["column"]


@pytest.mark.parametrize(
    ("shape", "stride", "orders"),
    [
        ((6, 3), (3, 1), ("row",)),
        ((6, 3), (1, 6), ("column",)),
        ((6, 3), (1, 8), ("column",)),
        ((6, 3), (1, 5), ()),
        ((6, 3), (6, 1), ()),
        ((1, 3), (3, 1), ("row", "column")),
        ((6, 1), (1, 1), ("row", "column")),
        ((2, 3, 3), (9, 3, 1), ("row",)),
    ],
)
def test_how_scales_lie(shape: tuple[int, ...], stride: tuple[int, ...], orders: tuple[str, ...]) -> None:
    assert memory_orders(torch.empty_strided(shape, stride)) == orders


def test_a_table_has_the_column_only_if_a_row_has_a_value(tables: Callable[..., Path]) -> None:
    header = render([_row(None)], FAMILY, ()).splitlines()[0]
    assert "x_scale" not in header.split(",")
    path = tables(_row(None), _row("row"))
    assert "x_scale" in path.read_text().splitlines()[0].split(",")
    assert [each["x_scale"] for each in read(path, FAMILY)] == [None, "row"]
    path.write_text(render([_row(None)], FAMILY, ()))
    assert [each["x_scale"] for each in read(path, FAMILY)] == [None]


def test_a_capture_records_the_order_of_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemmpipe.runtime.capture.recorder import recorder_for

    path = tmp_path / "captured.csv"
    monkeypatch.setenv("GEMMPIPE_CAPTURE", str(path))
    reload()
    for order, m in (("row", M), ("column", M), ("column", M), ("row", 1)):
        gemm_a8w8_blockscale(*_operands(order, m))
    recorder_for(path).flush()
    rows = [(row["M"], row["x_scale"], row["count"]) for row in csv.DictReader(path.open())]
    assert rows == [("8", "row", "1"), ("8", "column", "2"), ("1", "", "1")]
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    found = CsvShapes(path=str(path), rows_of=None).problems(FAMILY, defaults, "cpu_avx2")
    assert [(p["M"], p["x_scale"], p.weight) for p in found] == [(8, "row", 1.0), (8, "column", 2.0), (1, None, 1.0)]
    assert [FAMILY.spec(p).x_scale.order for p in found] == ["row", "column", None]
