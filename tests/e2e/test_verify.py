"""`gemmpipe verify` and `prebuild`, typed as a user types them, on tables that are right and wrong in every way."""

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from forked_programs import Forking
from pairwise import few

from gemmpipe.cli.main import main
from gemmpipe.core.device import cpu_device
from gemmpipe.core.paths import CHECKOUT

pytestmark = pytest.mark.usefixtures("own_locks")

SLOW_US = 1e6
"""More than any candidate takes: a row that records this is never slower than recorded."""
HEADER = "gfx,cu_num,M,N,K,libtype,us,kernelName,config,policy,device\n"


def _row(m: int, config: dict[str, object] | None, gfx: str | None = None, **cells: object) -> str:
    here = cpu_device()
    text = "" if config is None else json.dumps(config).replace('"', '""')
    row: dict[str, object] = {"libtype": "faulty", "us": SLOW_US, "kernelName": "faulty", "policy": "host interleaved"}
    row |= {"device": here.name} | cells
    place = f"{gfx or here.gfx},{here.cu_num if gfx is None else 132}"
    said_device = f'"{row["device"]}"'
    return (
        f'{place},{m},32,64,{row["libtype"]},{row["us"]},{row["kernelName"]},"{text}",{row["policy"]},{said_device}\n'
    )


def _right(pace_ms: int = 0) -> dict[str, object]:
    return {"KIND": "right", "PACE_MS": pace_ms}


Verify = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verify(folder: Path, capfd: pytest.CaptureFixture[str], faulty_arguments: tuple[str, ...]) -> Verify:
    """Verifies a table of these rows; the exit code, stdout and stderr."""

    def typed(*rows: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        Path("t.csv").write_text(HEADER + "".join(rows))
        capfd.readouterr()
        own = [argument for argument in faulty_arguments if not argument.startswith("shapes")]
        code = main(["verify", "table=t.csv", *own, *options])
        out, error = capfd.readouterr()
        return code, out, error

    return typed


def _verified() -> dict[int, dict[str, object]]:
    folder = max(Path("outputs/runs/verify").glob("*"), key=lambda path: path.stat().st_mtime_ns)
    frame = pd.read_csv(folder / "verified.csv").astype(object)
    return {int(str(row["problem"]).split("M=")[1].split(" ")[0]): row for row in frame.to_dict("records")}  # type: ignore[misc]


def test_rows_that_hold(verify: Verify) -> None:
    # Rows of a library, with knobs and as aiter writes them, and one whose own kernel is as fast on a busy machine too.
    code, out, error = verify(
        _row(8, {"method": "mm"}, libtype="torch"),
        _row(12, None, libtype="torch"),
        _row(16, _right()),
        options=("stages.verify_report.max_behind_pct=1000",),
    )
    assert (code, error) == (0, "")
    assert "verify: 3 of 3 rows hold; time over the recorded one: 0.0" in out
    assert "3 faster by more than 10 %" in out
    assert {row["verdict"] for row in _verified().values()} == {"holds"}
    assert all(0 < float(str(row["us"])) < SLOW_US for row in _verified().values())


def test_every_way_of_not_holding_is_told_and_decides_the_exit_code(
    verify: Verify, faulty_arguments: tuple[str, ...]
) -> None:
    rows = {
        1: (_row(1, _right(), us=0.01), r"slower: \S+ [mu]?s, 10.0 ns recorded \(\+\d+ %, 10 allowed\)"),
        2: (_row(2, _right(pace_ms=150)), r"behind: torch \S+ takes \S+ [mu]s, \d{2,3}\.\d % less"),
        3: (_row(3, {"KIND": "spoil_nan", "PACE_MS": 0}), "incorrect: error ratio 1.0000, must be below 0.05"),
        4: (
            _row(4, {"KIND": "raise_launch", "PACE_MS": 0}),
            r"launch_error: \S+faulty.py:\d+: RuntimeError: this k",
        ),
        5: (_row(5, {"KIND": "kill", "PACE_MS": 0}), "died: the worker died: signal 9"),
        6: (_row(6, {"KIND": "unfit", "PACE_MS": 0}), "unsupported: kind: unfit by name"),
        7: (_row(7, {"PACE_MS": 0}), r"knobs: faulty: \S+/faulty.py:\d+: KeyError: 'KIND'"),
        9: (_row(9, _right(), kernelName="faulty@0badcafe"), "kernel: its source or library is unknown here"),
        11: (_row(11, None), "knobs: the row of faulty has no config"),
        12: (_row(12, _right(), us=0), "time: us is 0.0, no time that was measured"),
        13: (_row(13, {"KIND": "compile_error", "PACE_MS": 0}), "compile_error: RuntimeError: ptxas failed"),
        16: (_row(16, {"method": "no"}, libtype="torch"), "unsupported: method: no 'no'"),
        20: (_row(20, {"method": "mm"}, libtype="torch"), ""),
    }
    code, out, _ = verify(*(row for row, _ in rows.values()))
    assert code == 1
    found = _verified()
    assert set(found) == set(rows)
    if re.match("slower|behind", str(found[20]["reason"])):  # its time alone, on a busy machine
        rows[20] = (rows[20][0], "slower|behind")
    for m, (_, reason) in rows.items():
        assert found[m]["verdict"] == ("stale" if reason else "holds"), m
        if reason:
            assert pd.Series([str(found[m]["reason"])]).str.match(reason).all(), (m, found[m]["reason"])
    at_once, _, later = out.partition("bench:")
    assert "faulty M=9 N=32 K=64: kernel: its source or library is unknown" in at_once, "told before anything is timed"
    held = {m for m, (_, reason) in rows.items() if not reason}
    assert f"verify: {len(held)} of {len(rows)} rows hold" in later
    folder = max(Path("outputs/runs/verify").glob("*"), key=lambda path: path.stat().st_mtime_ns)
    again = pd.read_csv(folder / "stale.csv")
    assert set(again["M"]) == set(rows) - held
    (line,) = [line for line in later.splitlines() if "to tune these again: " in line]
    options = shlex.split(line.partition("again: ")[2])
    assert options[:3] == ["gemmpipe", faulty_arguments[0], "kernel=faulty"]
    assert f"shapes.path={folder.resolve() / 'stale.csv'}" in options
    assert {"device=cpu", "retune=true"} < set(options)
    (output,) = [argument.partition("=")[2] for argument in options if argument.startswith("output=")]
    assert Path(output).is_file(), "the table that was verified"


@pytest.mark.slow
def test_what_is_printed_tunes_stale_rows_again_as_they_were(verify: Verify, capfd: pytest.CaptureFixture[str]) -> None:
    """The user's own family, backends and space are not among those that a bare command line finds."""
    own = ("space.KIND=[right]", "space.PACE_MS=[0]")
    lenient = [f"stages.verify_report.{key}_pct=1e6" for key in ("max_drift", "max_behind")]
    code, out, _ = verify(_row(8, _right(), us=0.01), options=own)
    assert code == 1
    options = shlex.split(out.partition("to tune these again: ")[2].splitlines()[0])
    assert {*own, "backend=[faulty,torch]", "executor.timeout_s=1"} < set(options)
    assert [argument for argument in options if argument.startswith("device")] == ["device=cpu"]
    assert main(options[1:]) == 0
    assert "1 of 1 problem tuned" in capfd.readouterr().out
    assert main(["verify", "table=t.csv", *options[1:3], "device=cpu", *lenient]) == 0


def test_times_that_mean_something_else_are_not_compared(verify: Verify) -> None:
    options = ("stages.verify_report.max_behind_pct=100000",)
    other = [_row(1, _right(), us=0.01, policy="graph"), _row(2, _right(), us=0.01, policy="cold graph")]
    beside = _row(3, _right(), us=0.01, policy="host interleaved shared_cpu")
    code, out, _ = verify(*other, beside, _row(4, _right()), options=options)
    assert code == 0
    assert "verify: 1 of 4 rows holds; 3 correct, but not compared with the recorded time; " in out
    found = _verified()
    assert {m: row["verdict"] for m, row in found.items()} == {**dict.fromkeys((1, 2, 3), "not compared"), 4: "holds"}
    assert "verify: 1 row not compared with the recorded time, taken while other processes used the device (sh" in out
    assert "verify: 1 row not compared with the recorded time: its policy is 'graph'" in out
    assert "its policy is 'graph', this run's 'host interleaved'" in str(found[1]["reason"])


def test_rows_of_other_models_are_counted_and_those_of_this_one_verified(verify: Verify) -> None:
    """Models with equal gfx and cu_num, as an H100 and an H200; rows that name none are tried."""
    options = ("stages.verify_report.max_behind_pct=100000",)
    rows = [_row(m, _right(), device=name) for m, name in ((2, "another CPU"), (3, "one more"), (4, ""))]
    code, out, _ = verify(_row(1, _right()), *rows, options=options)
    assert code == 0
    assert (
        f"; 2 for other devices: this machine is {cpu_device().gfx}/{cpu_device().cu_num} ({cpu_device().name})" in out
    )
    assert sorted(_verified()) == [1, 4]


def test_a_table_of_another_model_alone_is_verified_without_its_times(verify: Verify) -> None:
    options = ("stages.verify_report.max_behind_pct=100000",)
    code, out, _ = verify(_row(2, _right(), us=0.01, device="another CPU"), options=options)
    assert code == 0
    assert "verify: 0 of 1 row holds; 1 correct, but not compared with the recorded time" in out
    assert "its device is another CPU" in str(_verified()[2]["reason"])


def test_libraries_of_rows_join_by_themselves_and_those_not_here_are_no_fault(verify: Verify) -> None:
    """`onednn` and `asm` are not among the backends of the run; nobody knows `flydsl`."""
    packed = {"method": "float32_packed"}
    rows = [_row(1, packed, libtype="onednn"), _row(2, packed, libtype="onednn", us=0.01)]
    rows += [_row(m, None, libtype=label) for m, label in ((3, "asm"), (4, "hipblaslt"), (5, "flydsl"), (6, "asm"))]
    code, out, _ = verify(*rows, options=("backend=[faulty]",))
    found = _verified()
    missing = {m: str(row["reason"]) for m, row in found.items() if row["verdict"] == "cannot run here"}
    assert missing == {
        3: "asm: no AMD GPU: aiter's kernels are for these alone",
        4: "hipblaslt: no AMD GPU: hipBLASLt computes on AMD GPUs only",
        5: "flydsl: neither a backend of this run nor a library that gemmpipe knows",
        6: "asm: no AMD GPU: aiter's kernels are for these alone",
    }
    assert "load: t.csv: 2 rows cannot run here: asm: no AMD GPU" in out
    assert "verify: 1 of 6 rows holds; 4 cannot run here" in out
    assert found[1]["verdict"] == "holds"
    assert str(found[2]["reason"]).startswith("slower: ")
    assert code == 1, "the slower one"
    options = shlex.split(out.partition("to tune these again: ")[2].splitlines()[0])
    assert "backend=[faulty,onednn]" in options


def test_a_table_of_libraries_that_are_not_here_is_the_machines_fault(verify: Verify) -> None:
    code, _, error = verify(_row(1, None, libtype="asm"), _row(2, None, libtype="flydsl"))
    assert code == 3
    assert "table: t.csv: 1 row cannot run here: asm: no AMD GPU" in error
    assert "; 1 row cannot run here: flydsl: neither a backend" in error


def test_rows_of_other_devices_are_counted_and_a_table_without_ours_is_the_machines_fault(verify: Verify) -> None:
    code, out, _ = verify(_row(1, {"method": "mm"}, libtype="torch"), _row(1, _right(), gfx="sm_90"))
    assert code == 0
    assert "; 1 for other devices: this machine is cpu_" in out
    code, _, error = verify(_row(1, _right(), gfx="sm_90"))
    assert code == 3
    assert "t.csv has rows for sm_90/132, and this machine is cpu_" in error


def test_a_verification_in_batches_and_resumed_says_the_same(verify: Verify, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [_row(m, {"method": "mm"}, libtype="torch") for m in (1, 2)] + [_row(3, {"KIND": "spoil_nan", "PACE_MS": 0})]
    patient = ("stages.verify_report.max_drift_pct=1e6", "stages.verify_report.max_behind_pct=1e6")  # on a busy machine
    assert verify(*rows, options=("batch=1", *patient))[0] == 1
    before = {m: row["verdict"] for m, row in _verified().items()}
    assert before == {1: "holds", 2: "holds", 3: "stale"}
    assert main(["resume=last"]) == 1
    assert {m: row["verdict"] for m, row in _verified().items()} == before
    assert "verify: 2 of 3 rows hold" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "printed"),
    few(
        [
            (["verify"], "table: missing; expected tuned tables, as in table=outputs/tuned/NAME.csv"),
            (["verify", "inputs=[t.csv]", "kernel=a16w16"], "inputs: cannot be combined with table=, which this pipel"),
            (["verify", "table="], "table: '', expected a CSV file, a list of files or a glob"),
            (["verify", "table=no.csv"], "table: no file 'no.csv'"),
            (["verify", "table=bare.csv"], "table: bare.csv has no rows; expected a tuned table"),
            (["prebuild", "table=bare.csv"], "table: bare.csv has no rows; expected a tuned table"),
            (["prebuild", "table=bare.csv", "target=sm_90"], "table: bare.csv has no rows; expected a tuned table"),
            (
                ["verify", "table=t.csv", "kernel=a16w16", "target=sm_90"],
                "target: given; expected none, as rows are veri",
            ),
            (
                ["verify", "table=t.csv", "stages.verify_report.max_drift_pct=-1"],
                "stages.verify_report.max_drift_pct: -1 given, expected at least 0",
            ),
            (
                ["prebuild", "table=t.csv", "target=sm_9"],
                "target: no facts about architecture 'sm_9'; did you mean 'sm_90",
            ),
            (
                ["prebuild", "table=t.csv", "target=gfx942"],
                "table: t.csv has rows for sm_90/132, and none for target=gfx942",
            ),
            (
                ["prebuild", "table=t.csv", "stages.prebuild.workers=0"],
                "stages.prebuild.workers: 0 given, expected at least 1",
            ),
            (["tune", "table=t.csv", "kernel=a16w16"], "table: no stage of the pipeline 'tune' reads it"),
            (
                ["tune", "target=sm_90"],
                "target: no stage of the pipeline 'tune' reads it; merge, verify or prebuild do",
            ),
        ],
        1,
        2,
        4,
        5,
        8,
        9,
    ),
)
def test_a_mistake_is_one_line(options: list[str], printed: str, folder: Path, refusal: Callable[..., str]) -> None:
    columns = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,us,config\n"
    (folder / "t.csv").write_text(columns + "sm_90,132,1,2,3,False,bfloat16,bfloat16,False,False,torch,4,{}\n")
    (folder / "bare.csv").write_text(columns)
    assert printed in refusal(*options, "device=cpu")


@pytest.mark.slow  # two pools of compilers, which import torch
def test_kernels_are_compiled_once_without_a_gpu_and_found_ever_after(folder: Path, forked_programs: Forking) -> None:
    knobs = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "num_warps": 4, "num_stages": 2}
    config = json.dumps({**knobs, "GROUP_SIZE_M": 1, "NUM_KSPLIT": 1, "cache_modifier": ""}).replace('"', '""')
    shapes = [("sm_90,132", 16), ("sm_90,132", 32), ("gfx942,304", 16)]
    rows = [f'{place},{m},256,256,triton,5,product,"{config}"\n' for place, m in shapes]
    rows += ["sm_90,132,64,256,256,triton,5,product@0badcafe," + f'"{config}"\n', "sm_90,132,8,8,8,torch,5,torch,{}\n"]
    Path("bf16_tuned_gemm.csv").write_text("gfx,cu_num,M,N,K,libtype,us,kernelName,config\n" + "".join(rows))

    def prebuild(*options: str, cache: str = "cache") -> tuple[int, str]:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(folder / cache), "PYTHONPATH": str(CHECKOUT)}
        arguments = ("prebuild", "table=bf16_tuned_gemm.csv", *options)
        done = forked_programs.run(folder, environment, "gemmpipe", arguments)
        return done.returncode, done.stdout + done.stderr

    code, out = prebuild("target=[sm_90,gfx950]")
    assert "warning: target: bf16_tuned_gemm.csv has no row for gfx950; nothing is compiled for it" in out
    assert code == 1, "a row names a kernel that has changed"
    assert "kernel: its source or library is" in out
    assert "prebuild: sm_90: 1 kernel: 1 compiled in" in out
    assert "2 rows rejected" in out, "the changed one, and the library's without its knob"
    assert list((folder / "cache").glob("*/*.cubin"))
    code, out = prebuild()
    assert "prebuild: sm_90: 1 kernel: 0 compiled in 0.0 s of compile time, 1 found compiled" in out
    assert "prebuild: gfx942: 1 kernel: 1 compiled in" in out
    assert f"cache: {folder / 'cache'}" in out
    (folder / "file").touch()
    code, out = prebuild(cache="file")
    assert code == 3
    printed = f"cannot compile into Triton's cache {folder / 'file'}: Not a directory; TRITON_CACHE_DIR names another"
    assert out.splitlines()[-1] == f"gemmpipe: {printed}"
    assert out.count("Not a directory") == 1


def test_what_cannot_be_compiled_is_told(
    folder: Path, capfd: pytest.CaptureFixture[str], faulty_arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["compile_error", "compile_crash", "compile_hang"]
    rows = [_row(m, {"KIND": kind, "PACE_MS": 0}, gfx="sm_90") for m, kind in enumerate(kinds, 1)]
    (folder / "t.csv").write_text(HEADER + "".join(rows))
    own = [argument for argument in faulty_arguments if not argument.startswith("shapes")]
    assert main(["prebuild", "table=t.csv", *own, "stages.prebuild.timeout_s=2"]) == 1
    out, error = capfd.readouterr()
    assert "prebuild: sm_90: 3 kernels: 0 compiled in 0.0 s of compile time, 3 failed" in out
    assert "compiling took longer than stages.prebuild.timeout_s=2" in error
    assert error.count("warning: faulty M=") == 3


def test_a_cpu_checks_what_fits_in_its_budget_and_says_what_it_left(
    verify: Verify, capfd: pytest.CaptureFixture[str], faulty_arguments: tuple[str, ...]
) -> None:
    rows = [_row(m, _right()) for m in (16, 4, 8)]
    code, out, _ = verify(*rows, options=("cpu_budget_s=0.001",))
    assert code == 0
    assert "1 of 3 problems timed in cpu_budget_s=0.001" in out
    assert "left: 2 with M 8 to 16 " in " ".join(out.split())
    assert out.count("resume with: gemmpipe resume=") == out.count("resume=") == 1
    assert "verify: 1 of 1 row holds" in out
    assert list(_verified()) == [4]
    assert main([faulty_arguments[0], "resume=last", "cpu_budget_s=null"]) == 0
    assert "verify: 3 of 3 rows hold" in capfd.readouterr().out
    assert sorted(_verified()) == [4, 8, 16]
