"""Whole runs of `lint` on a device: entries against the default of an engine with modelled times."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from gemmpipe.cli.main import main
from gemmpipe.core.data import Device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.formats.engine_lint import lint
from gemmpipe.stages.lint import _Timing

LIKE = Path(__file__).parents[1] / "engine_like"
NAME = "N=128,K=128,device_name=X,dtype=fp8_w8a8,block_shape=[128,128].json"
DEFAULT: Mapping[str, object] = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 32,
    "num_warps": 4,
    "num_stages": 2,
}
Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("own_locks")


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Lints the folder `vllm` with one file of these entries; returns exit code, stdout and stderr."""

    def run_lint(entries: Mapping[str, object], *args: str, name: str = NAME) -> tuple[int, str, str]:
        path = Path("vllm") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(entries))
        capfd.readouterr()
        given = ("kernel=engine_like", "device=cpu", "timer@stages.bench.timer=quick", "executor=told")
        code = main([f"--config-dir={LIKE}", "lint", "vllm", *given, *args])
        out, error = capfd.readouterr()
        return code, out, error

    return run_lint


def _table(name: str) -> pd.DataFrame:
    (path,) = Path("outputs/runs/lint").glob(f"*/{name}.csv")
    return pd.read_csv(path)


@pytest.mark.e2e
def test_entries_slower_than_the_default_are_found(run: Run) -> None:
    # For 8 and 64 rows the default takes 10 * (1 + 2 + 2); a tile of 16 rows with 2 stages takes 35 and 65.
    slow, fast = {**DEFAULT, "BLOCK_SIZE_M": 16}, {**DEFAULT, "num_stages": 3}
    code, out, error = run({"8": slow, "64": slow, "256": fast, "1024": DEFAULT})
    assert (code, error) == (0, "")
    assert "64: warning: takes 65.00 us, 1.30 times the engine's default (1.30 to 1.30); tune this M" in out
    assert "timed: 1 file: 1 warning" in out
    assert _table("slower")["key"].astype(str).tolist() == ["64"]
    assert sorted(_table("entries")["M"]) == [8, 64, 256, 1024]


@pytest.mark.e2e
def test_slower_pct_is_the_limit(run: Run) -> None:
    slow = {**DEFAULT, "BLOCK_SIZE_M": 16}
    assert "timed: 1 file: nothing found" in run({"64": slow}, "stages.lint_timings.slower_pct=31")[1]


def test_entries_that_cannot_run_are_not_timed(run: Run) -> None:
    code, out, _ = run({"8": {**DEFAULT, "num_stages": 7}, "64": {**DEFAULT, "BLOCK_SIZE_M": 48}})
    assert code == 1, "a tile side other than a power of two is an error without a device too"
    assert "not timed: no entry runs here" in out
    assert "bench:" not in out


def test_experts_need_the_sizes_that_their_name_lacks(run: Run) -> None:
    name = "E=8,N=128,device_name=X.json"
    out = run({}, name=name)[1]
    assert "not timed: its name does not have the whole product; model_dim= and topk= complete it" in out
    out = run({"8": DEFAULT}, "model_dim=64", "topk=2", name=name)[1]
    assert "expected another kernel=" in out


def test_the_name_of_a_file_says_the_dtype_of_its_experts(h200: Device, tmp_path: Path) -> None:
    """kernel=fmoe is in 16 bits unless a dtype is given; one that does not fit is stated with the name that it has."""
    path = tmp_path / "E=8,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
    path.write_text(json.dumps({"8": {**DEFAULT, "BLOCK_SIZE_N": 64}}))
    (file,) = lint([path], "sglang", (h200.name,))

    def timing(dtype: str | None) -> Any:
        defaults = KernelDefaults(dtype=dtype, out_dtype=None, bias=None)
        context = SimpleNamespace(family=load_family("fmoe"), device=h200, defaults=defaults)
        made = _Timing(lint=SimpleNamespace(model_dim=512, topk=2), context=context)  # type: ignore[arg-type]
        made.add(file)
        return made

    found = timing(None)
    assert found.notes == []
    assert [problem["q_dtype_w"] for problem in found.problems] == ["float8_e4m3fn"]
    (note,) = timing("bfloat16").notes
    assert "kernel=fmoe reads E=8,N=256,device_name=NVIDIA_H200.json; kernel.dtype= and" in note.text


def test_timed_false_only_checks_the_file(run: Run) -> None:
    code, out, error = run({"8": DEFAULT}, "timed=false")
    assert (code, error) == (0, "")
    assert "lint: 1 file: 1 warning" in out
    assert "bench:" not in out
