"""`gemmpipe lint` on the command line: paths without a key, output, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gemmpipe.cli.command_line import parse_command_line
from gemmpipe.cli.main import main
from gemmpipe.pipeline.plan import Plan

NAME = "N=1024,K=2048,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
KNOBS = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "vllm" / NAME
    path.parent.mkdir()
    path.write_text(json.dumps({str(m): KNOBS for m in (2048, 4096)}))
    return path


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize("argv", [["vllm"], [f"vllm/{NAME}"], [f"path=vllm/{NAME}"], ["./vllm", "vllm"], ["~/vllm"]])
def test_paths_without_a_key(
    argv: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert main(["lint", *argv]) == 0
    out, error = capfd.readouterr()
    assert error == ""
    assert "warning: no key of at most 16: calls of 1 to 3,072 rows use the entry of M = 2048" in out
    assert out.splitlines()[-1].startswith("lint: ")
    assert not Path("outputs").exists(), "a check leaves nothing behind"


def test_a_file_in_this_folder_is_no_override(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["lint", NAME, "engine=vllm"]) == 0
    assert parse_command_line(["lint", NAME, "engine=vllm"]).paths == (NAME,)


def test_an_error_ends_with_1(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "vllm", "engine=sglang"]) == 1
    assert "error: sglang does not look for this name" in capfd.readouterr().out
    file.write_text(json.dumps({"1": KNOBS | {"BLOCK_SIZE_K": 256}}))
    assert main(["lint", "vllm"]) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nope"], "nope: no such file or folder"),
        (["."], "no file of an engine"),
        ([], "lint: no path"),
        (["vllm", "engine=vlm"], "engine: no engine 'vlm'; did you mean 'vllm'"),
        (["vllm", "engine=", "timed=true"], "engine=: no value; expected engine=VALUE"),
        (["vllm", "stages.lint.pahts=[x]"], "pahts"),
    ],
)
def test_a_usage_error_is_one_line(
    argv: list[str], message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", *argv]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_on_a_device_short_keys_are_keys(file: Path, plans: list[Plan]) -> None:
    assert main(["lint", f"vllm/{NAME}", "device=cpu", "topk=8", "model_dim=64", "engine=vllm"]) == 0
    (plan,) = plans
    assert plan.pipeline == "lint"
    stage = plan.stages["lint"]
    found = {name: getattr(stage, name) for name in ("paths", "engine", "timed", "model_dim", "topk")}
    assert found == {"paths": (f"vllm/{NAME}",), "engine": "vllm", "timed": True, "model_dim": 64, "topk": 8}
    assert main(["lint", "vllm", "device=cpu", "timed=false"]) == 0
    assert plans[1].stages["lint"].timed is False  # type: ignore[attr-defined]


@pytest.mark.e2e
def test_a_check_needs_neither_torch_nor_hydra(file: Path) -> None:
    script = (
        "import sys; from gemmpipe.cli.main import main; code = main(['lint', 'vllm']); "
        "print(code, *[m for m in ('torch', 'hydra', 'pandas', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"


def test_a_tuned_table_is_checked_by_verify(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "t.csv").write_text("gfx,cu_num,M,N,K\n")
    assert main(["lint", "t.csv"]) == 2
    expected = "expected gemmpipe verify table=t.csv kernel=FAMILY"
    assert f"t.csv: a tuned table, no engine's file; {expected}" in capfd.readouterr().err


def test_other_pipelines_take_no_paths() -> None:
    assert main(["quick", "vllm"]) == 2
