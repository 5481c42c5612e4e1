"""The benchmark of SGLang's functions without SGLang and a GPU: its stand-ins, its products and its table."""

import csv
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import sglang_linear


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> Iterator[sglang_linear._Finder]:
    made = sglang_linear._Finder()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, made])
    before = set(sys.modules)
    yield made
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_kernel_of_a_stand_in_refuses_a_call(finder: sglang_linear._Finder) -> None:
    types = importlib.import_module("sgl_kernel.scalar_type")
    assert types.scalar_types.uint4b8  # names are there: SGLang reads them at import
    with pytest.raises(RuntimeError, match=r"sgl_kernel\.moe_sum_reduce is a stand-in"):
        importlib.import_module("sgl_kernel").moe_sum_reduce()
    assert "sgl_kernel" in sglang_linear.stand_ins()


@pytest.mark.parametrize("name", sorted(sglang_linear.REAL))
def test_what_sglang_calls_has_no_stand_in(finder: sglang_linear._Finder, name: str) -> None:
    assert finder.find_spec(name, None) is None


def test_the_commands_count_the_engines_library_in_its_order() -> None:
    text = sglang_linear.__doc__ or ""
    assert "+kernel.key.x_scale=column" in text
    assert "scaled_mm,deepgemm]'" in text


def test_products_are_written_for_tuning(tmp_path: Path) -> None:
    assert sglang_linear.main([str(tmp_path), "--write"]) == 0
    with (tmp_path / "a8w8_blockscale.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(sglang_linear.SIZES) * len(sglang_linear.MS)
    assert rows[0] == {"M": "1", "N": "6144", "K": "4096"}


def test_the_table_has_a_line_per_case(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"case": "fp8 6144x4096", "sglang_us": 12.0, "plugin_us": 10.0, "ratio": 1.2, "kernel": "deepgemm"}
    row |= {"host_sglang_us": 40.0, "host_plugin_us": 35.0, "error_sglang": 0.04, "error_plugin": 0.03}
    rows = [{**row, "M": 1, "step": "exact"}, {**row, "M": 16, "step": "engine", "error_plugin": 0.05}]
    sglang_linear.print_table(sglang_linear.Result(rows=rows, failures=["bf16: RuntimeError: no"]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("fp8 6144x4096")
    assert "12.0 -> 10.0 (1.20)" in lines[2]
    assert "12.0 -> 10.0 (1.20=)" in lines[2]
    assert lines[2].split()[-4:] == ["->", "35", "0.0400", "0.0500"]
    assert lines[3:] == ["SGLang's kernel of fp8: deepgemm", "FAILED: bf16: RuntimeError: no"]
