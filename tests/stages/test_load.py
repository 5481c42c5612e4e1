"""The load stage on a table of aiter's, on a mocked MI300X with and without a mock of the package."""

from pathlib import Path

import aiter_stand_in
import pytest
from aiter_stand_in import pretended
from stage_contexts import stage_context

from gemmpipe.core.device import NO_DEVICE
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.core.events import Events
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.stages import Context
from gemmpipe.stages.load import Load
from gemmpipe.stages.prebuild import Prebuild

TABLE = (
    "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n"
)
KEY = "256,384,False,torch.bfloat16,torch.bfloat16,False,False"
LIBRARIES = {"hipblaslt": "21434,0,4.5,Cijk", "asm": "5,4,4.5,bf16_32x64_splitk"}
OTHERS = {"triton": "0,0,4.5,auto", "flydsl": "1,0,4.5,y"}
LOAD = Load(read="table", baselines=0)


def _context(folder: Path, rows: dict[str, str], said: list[str], *, here: bool = True) -> Context:
    lines = [f"gfx942,304,{m},{KEY},{name},{rest},0.0,1,1\n" for m, (name, rest) in enumerate(rows.items(), 1)]
    table = folder / "bf16_tuned_gemm.csv"
    table.write_text("".join([TABLE, *lines]))
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    events = Events(listeners=[lambda event: said.append(event.text)])
    device = pretended("gfx942") if here else NO_DEVICE
    return stage_context(folder, load_family("a16w16"), defaults, device, events=events, table=table)


def test_libraries_that_rows_name_join_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run chose no backend; workers get those of the context."""
    said: list[str] = []
    context = _context(tmp_path, LIBRARIES | OTHERS, said)
    with aiter_stand_in.package(monkeypatch, tmp_path / "lists"):
        found = LOAD.run({}, context)
    assert set(found["shortlist"]["libtype"]) == {"hipblaslt", "asm", "triton"}
    assert set(context.row_backends) == set(LIBRARIES)
    for label in LIBRARIES:
        assert context.implementation(label) is context.row_backends[label]
    flydsl = "flydsl: neither a backend of this run nor a library that gemmpipe knows"
    assert dict(zip(found["selections"]["libtype"], found["selections"]["reason"], strict=True)) == {
        **dict.fromkeys(["hipblaslt", "asm", "triton"], ""),
        "flydsl": f"cannot run here: {flydsl}",
    }
    assert f"load: {tmp_path}/bf16_tuned_gemm.csv: 1 row cannot run here: {flydsl}" in said


def test_without_the_package_other_rows_are_left(tmp_path: Path) -> None:
    said: list[str] = []
    found = LOAD.run({}, _context(tmp_path, LIBRARIES | OTHERS, said))
    assert list(found["shortlist"]["libtype"]) == ["triton"]
    assert sum("1 row cannot run here: " in line for line in said) == 3
    assert any("asm: the package aiter cannot be imported: No module named 'aiter'" in line for line in said)
    assert not any(line.startswith("stale") for line in said)


def test_a_table_of_missing_libraries_is_an_error_of_the_machine(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"1 row cannot run here: hipblaslt: .*; nothing is left to check"):
        LOAD.run({}, _context(tmp_path, LIBRARIES, []))


def test_compiling_ahead_needs_no_library(tmp_path: Path) -> None:
    said: list[str] = []
    context = _context(tmp_path, LIBRARIES, said, here=False)
    Prebuild(workers=1, timeout_s=60).run(LOAD.run({}, context), context)
    assert said[-1] == "prebuild: gfx942: nothing to compile: 2 rows of libraries need no kernel"
    assert not context.unsolved
