"""aiter's own tables as a format: its rows united and cleaned, ours left out, hipBLASLt's solutions stored."""

import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest

from gemmpipe.cli.main import main
from gemmpipe.core.data import Candidate, Device, Status, Trial
from gemmpipe.core.device import arch_device
from gemmpipe.core.events import Event, Events
from gemmpipe.core.schema import SELECTIONS
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.formats import Target
from gemmpipe.formats.aiter_csv import AiterCsv
from gemmpipe.journal import Journal
from gemmpipe.tables import store

HEADER = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"
BF16 = (
    "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
)
ROW = "gfx942,304,{m},3072,1536,ck,8,2,{us},a8w8_blockscale_1x128x128,1.43,714.43,0.0\n"


@pytest.mark.usefixtures("own_locks")
def test_aiters_tables_are_united_and_cleaned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.csv").write_text(HEADER + ROW.format(m=1, us="6.61") + ROW.format(m=2, us="0"))
    (folder / "b.csv").write_text(HEADER.replace(",", ", ") + ROW.format(m=1, us="6.5") + ROW.format(m=2, us="7.0"))
    arguments = ["merge", "kernel=a8w8_blockscale", "inputs=[a.csv,b.csv]", "format=[aiter]", "output=out"]
    assert main(arguments) == 0
    path = folder / "out" / "aiter" / "a8w8_blockscale_tuned_gemm.csv"
    assert path.read_text() == HEADER + ROW.format(m=1, us="6.5") + ROW.format(m=2, us="7.0")
    assert "left out: 1 slower, 1 without a time" in capsys.readouterr().out.replace(
        "1 without a time, 1 slower", "1 slower, 1 without a time"
    )


@pytest.mark.usefixtures("own_locks")
def test_a_table_without_libtype_is_written_with_what_aiter_means(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, row = HEADER.replace("libtype,", ""), ROW.replace("ck,", "")
    (folder / "a.csv").write_text(header + row.format(m=1, us="6.61") + row.format(m=2, us="inf"))
    assert main(["merge", "kernel=a8w8_blockscale", "inputs=[a.csv]", "format=[aiter]", "output=out"]) == 0
    path = folder / "out" / "aiter" / "a8w8_blockscale_tuned_gemm.csv"
    assert path.read_text() == HEADER + ROW.format(m=1, us="6.61")
    assert "aiter: 1 row without a time left out" in capsys.readouterr().err


@pytest.fixture
def mi300x() -> Device:
    return arch_device("gfx942")


def _selections(*rows: dict[str, object]) -> pd.DataFrame:
    key = {"M": 1, "N": 1280, "K": 8192, "bias": False, "dtype": "bfloat16", "outdtype": "bfloat16"}
    base = {"format": "", "gfx": "gfx942", "cu_num": 304, "us": 4.5, "err_ratio": 0.0, "splitK": 1, "solidx": 0, **key}
    base |= {"scaleAB": False, "bpreshuffle": False, "policy": "graph", "run_id": "r1", "bucket": ""}
    columns = [*SELECTIONS, *key, "scaleAB", "bpreshuffle"]
    return pd.DataFrame([{**base, **row} for row in rows], columns=columns)


def _cktile_rows() -> list[dict[str, object]]:
    row = {"libtype": "ck", "solidx": 3, "kernelName": "ck_3", "splitK": 1, "us": 4.5, "err_ratio": 0.0, "format": ""}
    key = {"gfx": "gfx942", "cu_num": 304, "N": 1280, "K": 8192, "dtype": "float8_e4m3fnuz", "outdtype": "bfloat16"}
    return [{**dict.fromkeys(SELECTIONS), **row, **key, "M": m} for m in (1, 2)]


def test_hipblaslts_solutions_are_stored_and_our_kernels_are_not(tmp_path: Path, mi300x: Device) -> None:
    emitted: list[Event] = []
    target = Target(
        folder=tmp_path, device=mi300x, run_id="r1", provenance={}, events=Events(listeners=[emitted.append])
    )
    rows = (
        {"M": 1, "libtype": "hipblaslt", "solidx": 21434, "config": json.dumps({"solidx": 21434}), "kernelName": "h@1"},
        {"M": 2, "libtype": "triton", "config": '{"BLOCK_SIZE_M":16}', "kernelName": "product@abc"},
        {"M": 3, "libtype": "torch", "config": '{"method":"float32_copy"}', "kernelName": "torch"},
        {"M": 4, "libtype": "ck", "config": '{"solidx":3,"NUM_KSPLIT":1}', "kernelName": "ck_3@1"},
        {"M": 5, "libtype": "asm", "config": '{"kernelName":"","NUM_KSPLIT":1}', "kernelName": "asm_own_choice@1"},
        {"M": 7, "libtype": "torch", "config": '{"method":"mm"}', "kernelName": "torch"},
        {"M": 8, "libtype": "torch", "outdtype": "float32", "config": '{"method":"mm"}', "kernelName": "torch"},
        {"M": 6, "libtype": "asm", "splitK": 4, "config": '{"kernelName":"_ZN5a","NUM_KSPLIT":4}', "kernelName": "a@1"},
    )
    path, _ = AiterCsv(file=None).write(load_family("a16w16"), _selections(*rows), target)
    assert path == tmp_path / "aiter" / "bf16_tuned_gemm.csv"
    header, line, assembly, plain = path.read_text().splitlines()
    assert header == BF16
    bf16 = "False,torch.bfloat16,torch.bfloat16,False,False"
    assert line == f"gfx942,304,1,1280,8192,{bf16},hipblaslt,21434,0,4.5,h@1,0.0,0,0"
    assert plain == f"gfx942,304,7,1280,8192,{bf16},torch,0,0,4.5,torch,0.0,0,0", (
        "aiter's table has torch's product too"
    )
    assert assembly == f"gfx942,304,6,1280,8192,{bf16},asm,0,4,4.5,_ZN5a,0.0,0,0", "which aiter finds by its own name"
    assert "aiter: 3 of 8 selections left out: not kernels of aiter" in [e.text for e in emitted]
    unnamed = "aiter: 2 of 8 selections left out: kernels without a name, by which aiter finds them"
    assert unnamed in [e.text for e in emitted], "composable ones have a number, and aiter's own choice nothing"
    text = "aiter: 1 of 2 selections left out: aiter's table has no column x_scale"
    blocks = load_family("a8w8_blockscale")
    by_order = pd.DataFrame(
        [{**row, "x_scale": order} for row, order in zip(_cktile_rows(), (None, "row"), strict=True)]
    )
    AiterCsv(file=None).write(blocks, by_order, target)
    assert text in [e.text for e in emitted]
    row, *_ = store.read(path, load_family("a16w16"))
    assert (row["solidx"], row["splitK"]) == (21434, 1)
    assert AiterCsv(file=None).write(load_family("a16w16"), _selections(*rows[1:5]), target) == []


def test_selections_of_an_older_run_lack_later_columns(tmp_path: Path, mi300x: Device) -> None:
    target = Target(folder=tmp_path, device=mi300x, run_id="r1", provenance={}, events=Events(listeners=[]))
    older = _selections({"libtype": "torch", "config": '{"method":"mm"}', "kernelName": "torch"})
    older = older.drop(columns="backend_ratios")
    path, _ = AiterCsv(file=None).write(load_family("a16w16"), older, target)
    (row,) = store.read(path, load_family("a16w16"))
    assert (row["libtype"], row["us"]) == ("torch", 4.5)


def test_a_family_that_aiter_has_no_table_of(tmp_path: Path, mi300x: Device) -> None:
    emitted: list[Event] = []
    target = Target(
        folder=tmp_path, device=mi300x, run_id="r1", provenance={}, events=Events(listeners=[emitted.append])
    )
    assert AiterCsv(file=None).write(load_family("a16w16_atomic"), _selections({"libtype": "triton"}), target) == []
    assert [event.text for event in emitted] == ["aiter: no table of a16w16_atomic"]


def test_a_run_that_chose_a_solution_stores_its_number(folder: Path, mi300x: Device) -> None:
    family = load_family("a16w16")
    shapes = ["kernel=a16w16", "shapes=list", "shapes.items=[{M: 16, N: 1280, K: 8192}]"]
    assert main(["capture", *shapes]) == 0
    (run,) = (folder / "outputs" / "runs" / "capture").iterdir()
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    problem = make_problem(family, {"M": 16, "N": 1280, "K": 8192}, defaults, "gfx942", "test")
    journal = Journal(run)
    journal.write("session", device=asdict(mi300x))
    journal.write("problem", id=problem.id, key=dict(problem.key), weight=1.0, layer="")
    finals = ((Candidate.of("hipblaslt", {"solidx": 21434}), 9.0), (Candidate.of("torch", {"method": "mm"}), 12.0))
    for candidate, time_us in finals:
        facts = {"status": Status.OK, "launches": 5, "samples_us": (time_us,) * 5, "err_ratio": 0.0}
        journal.trial(Trial(stage="bench", problem=problem.id, candidate=candidate, **facts))
    journal.write("done", stage="bench", problem=problem.id)
    journal.close()
    assert main(["tune", f"reuse={run}", "chain=[select,merge]", "format=[csv,aiter]", "output=tuned"]) == 0
    for path in ("tuned/bf16_tuned_gemm.csv", "tuned/aiter/bf16_tuned_gemm.csv"):
        (row,) = store.read(folder / path, family)
        assert (row["libtype"], row["solidx"], row["us"]) == ("hipblaslt", 21434, 9.0)
