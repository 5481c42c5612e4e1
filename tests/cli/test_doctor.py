"""The doctor works without a GPU and reports why things are missing."""

import datetime
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from gemmpipe import __version__
from gemmpipe.cli import doctor, machine
from gemmpipe.cli.main import main
from gemmpipe.core.device import cpu_device


def _joined(text: str) -> str:
    """Long lines are continued on indented ones."""
    return re.sub(r"\n    ?(?=[a-z])", " ", text)


def test_on_a_cpu(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", f"{folder / 'gone.csv'}:{folder / 'broken.csv'}")
    (folder / "broken.csv").write_text("what,ever\n1,2\n")
    assert main(["doctor", "kernel=a16w16", "device=cpu"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    for text in (
        f"gemmpipe {__version__}, python 3.",
        "torch 2.",
        "cpu:",
        "cores",
        "triton unavailable: no GPU",
        "torch available",
    ):
        assert text in re.sub(" +", " ", out)
    assert "gone.csv: not found" in out
    assert "broken.csv: cannot be used" in out
    assert str(folder / "data" / "gemmpipe" / "tuned" / "bf16_tuned_gemm.csv") in out
    own = folder / "data" / "gemmpipe" / "tuned"
    own.mkdir(parents=True)
    for name in ("llama_bf16_tuned_gemm.csv", "untuned_bf16_tuned_gemm.csv"):
        (own / name).write_text("what,ever\n1,2\n")
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", "~/mine.csv:")
    monkeypatch.setenv("HOME", str(folder))
    assert main(["doctor", "kernel=a16w16", "device=cpu"]) == 0
    out, _ = capsys.readouterr()
    assert f"{folder / 'mine.csv'}: not found" in out, "as the run time reads it"
    assert "llama_bf16_tuned_gemm.csv" in out, "a model's own table"
    assert "untuned_bf16" not in out
    assert " .: not found" not in out


def test_rows_that_can_run_here_are_counted(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, key = cpu_device(), "False,torch.bfloat16,torch.bfloat16,False,False"
    header = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName\n"
    here = f"{device.gfx},{device.cu_num}"
    rows = [f"{here},{m},64,96,{key},{lib},0,0,{us},n\n" for m, lib, us in ((1, "torch", 5), (2, "flydsl", 4))]
    rows += [f"{here},3,64,96,{key},asm,0,0,inf,n\n", f"gfx942,304,4,64,96,{key},asm,0,0,5,n\n"]
    (folder / "aiters.csv").write_text(header + "".join(rows))
    (folder / "theirs.csv").write_text(header + rows[3])
    named = header.replace("\n", ",device\n") + "".join(
        f"{here},{m},64,96,{key},torch,0,0,5,n,{name}\n" for m, name in ((1, "NVIDIA H100"), (2, ""), (3, device.name))
    )
    (folder / "models.csv").write_text(named)
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", "aiters.csv:theirs.csv:models.csv")
    monkeypatch.setenv("GEMMPIPE_GIVEN_TABLES_ONLY", "1")
    monkeypatch.setenv("AITER_REBUILD", "1")
    assert main(["doctor", "kernel=a16w16", "device=cpu"]) == 0
    out, _ = capsys.readouterr()
    flat = " ".join(out.split())  # long lines are continued on indented ones
    other = f"for gfx942/304, this is {device.gfx}/{device.cu_num} (1)"
    flydsl = "backend: no 'flydsl' in this installation (1)"
    assert "  AITER_CONFIG_GEMM_BF16\n" in out
    assert f"aiters.csv: 4 rows, 1 can run here: {flydsl}; {other}; not timed (1) " in flat
    assert f"theirs.csv: 1 row, 0 can run here: {other} " in flat
    assert f"models.csv: 3 rows, 3 can run here; 1 timed on NVIDIA H100, not {device.name}" in flat
    assert "GEMMPIPE_GIVEN_TABLES_ONLY is set: neither the user's nor the shipped tables are read" in out
    assert str(folder / "data") not in out
    assert "AITER_REBUILD is not read" in out


def test_the_current_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no run folder: the current directory is the user's."""
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "device.kind=cuda", "device.index=99"]) != 0
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("mine: true\n")
    assert main(["doctor", "device.kind=cuda", "device.index=99"]) != 0
    assert (tmp_path / ".hydra" / "config.yaml").read_text() == "mine: true\n"


def test_it_ends_with_a_verdict_and_the_next_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    (folder / "bf16_tuned_gemm.csv").touch()
    assert main(["doctor", "kernel=a16w16", "device=cpu", "table=bf16_tuned_gemm.csv"]) == 0
    out = _joined(capsys.readouterr().out)
    for own in ("triton", "gluon", "skinny", "sliced"):
        assert re.search(rf"^  {own} +unavailable: no GPU: Triton compiles for GPUs$", out, re.MULTILINE)
    assert f"  Triton's cache: {folder / 'cache'}, " in out
    assert "cores may be used, " in out
    *_, ready, following = out.splitlines()
    assert re.match(r"ready: 2 of \d+ backends \(torch, onednn\); triton, gluon, skinny, sliced, .*: no GPU", ready)
    assert following.startswith("next: gemmpipe ")
    command = shlex.split(following.removeprefix("next: gemmpipe "))
    assert {"kernel=a16w16", "device=cpu"} <= set(command)
    assert not any(word.startswith("table=") for word in command), "a tuning run reads none"
    assert main(["capture", *command]) == 0, "the command that it names composes"


@pytest.mark.parametrize("page", ["README.md", "docs/start/five_minutes.md"])
def test_the_next_command_on_a_cpu_is_that_of_the_page(
    page: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default kernel is one whose operands libraries of a CPU convert: a run with it compares little."""
    text = (Path(__file__).parents[2] / page).read_text()
    (wanted,) = re.findall(r"^ *\$ (gemmpipe .*device=cpu .*)$", text, re.MULTILINE)
    assert main(["doctor", "device=cpu"]) == 0
    note, _, following = _joined(capsys.readouterr().out).splitlines()[-3:]
    assert sorted(shlex.split(following.removeprefix("next: "))) == sorted(shlex.split(wanted))
    assert note == (
        "note: libraries of a CPU convert the operands of a8w8_blockscale before they multiply them; those of a16w16 "
        "they multiply as stored"
    )
    for typed in ("kernel.dtype=float8_e4m3fn", "space.num_stages=[3]", "kernel=a8w8_blockscale", "shapes=llama70b"):
        assert main(["doctor", "device=cpu", typed]) == 0
        lines = _joined(capsys.readouterr().out).splitlines()
        assert "kernel=a8w8_blockscale" in lines[-1], "what was typed belongs to this kernel"
        assert not any(line.startswith("note: libraries of a CPU") for line in lines)


def test_the_next_command_without_a_backend(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "device=cpu", "backend=[triton]"]) == 0
    *earlier, ready, following = _joined(capsys.readouterr().out).splitlines()
    assert ready == "ready: 0 of 1 backend; triton: no GPU"
    assert not any(line.startswith("note: libraries of a CPU") for line in earlier), "no kernel is proposed"
    assert following.startswith("next: gemmpipe --help backend")


def test_a_family_without_a_problem_still_has_a_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default model has no experts."""
    assert main(["doctor", "kernel=fmoe", "device=cpu"]) == 0
    lines = _joined(capsys.readouterr().out).splitlines()
    assert any(
        line == "backends for fmoe: not checked: the default shapes have no problem of this kernel (no experts in this "
        "model); expected shapes= with some, such as shapes=fmoe_deepseek_v3_tp8"
        for line in lines
    )
    assert any(line.startswith("tuned tables of fmoe") for line in lines)
    assert lines[-1] == "next: gemmpipe doctor kernel=fmoe device=cpu shapes=fmoe_deepseek_v3_tp8"
    assert main(shlex.split(lines[-1].removeprefix("next: gemmpipe "))) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("next: gemmpipe kernel=fmoe")


def test_a_full_disk_and_few_cores_are_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LEAST_FREE_BYTES", 2**62)
    monkeypatch.setattr(machine, "CORES_PER_GPU", 10_000)
    gpu = replace(cpu_device(), kind="cuda")
    full, cores = list(machine.warnings_of([gpu, gpu], folder))[::2]
    assert full.startswith(f"{folder}: ")
    assert "free; a run needs about " in full
    assert "cores compile for 2 GPUs; about 10000 per GPU keep them busy" in cores


@pytest.mark.parametrize(("days", "time", "age"), [(0, "00:00:00", "today"), (1, "23:59:59", "1 day ago")])
def test_the_age_of_a_table_is_in_days_of_the_calendar(tmp_path: Path, days: int, time: str, age: str) -> None:
    table = tmp_path / "bf16_tuned_gemm.csv"
    day = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=days)
    runs = {"r": {"time": f"{day.isoformat()}T{time}+00:00"}}
    table.with_name(f"{table.name}.meta.json").write_text(json.dumps({"runs": runs}))
    assert doctor._tuned_text(table) == f"; tuned {day.isoformat()} ({age})"


def test_the_age_of_a_table(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    table = folder / "bf16_tuned_gemm.csv"
    table.write_text("gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName\n")
    table.with_name(f"{table.name}.meta.json").write_text('{"runs": {"r": {"time": "2026-01-02T03:04:05+00:00"}}}')
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", str(table))
    assert main(["doctor", "kernel=a16w16", "device=cpu"]) == 0
    flat = " ".join(capsys.readouterr().out.split())
    assert re.search(r"bf16_tuned_gemm.csv: 0 rows.*; tuned 2026-01-02 \(\d+ days ago\)", flat)
