"""`gemmpipe export` after real runs, and its refusals."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from gemmpipe.cli.main import main
from gemmpipe.core.device import gpu_kind
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.engines.own_kernel import own_kernel
from gemmpipe.family import load_family
from gemmpipe.tables import store
from gemmpipe.tables.merge import is_provisional

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))

from make_h200_report import unpack

LIKE = Path(__file__).parents[1] / "engine_like"
TUNE = (
    f"--config-dir={LIKE}",
    "kernel=engine_like",
    "space@stages.engine.spaces.dense=engine_like",
    "shapes=list",
    "shapes.items=[{M: [8, 64], N: 128, K: 128}]",
    "device=cpu",
    "backend=[torch]",
    "timer@stages.bench.timer=quick",
    "executor=told",
)

pytestmark = [pytest.mark.usefixtures("own_locks", "folder")]


def export(*arguments: str) -> int:
    return main([f"--config-dir={LIKE}", "export", *arguments])


def run_folder() -> Path:
    return max(Path("outputs/runs").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.e2e
def test_a_run_that_timed_the_form_is_exported_later(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TUNE, "format=[csv,vllm]", "output=first"]) == 0
    (written,) = Path("first/vllm").glob("N=*.json")
    assert ": gemmpipe export last vllm output=first install=true\n" in capfd.readouterr().out
    assert export("last", "vllm", "output=later", "model=org/model") == 0
    out = capfd.readouterr().out
    (again,) = Path("later/vllm").glob("N=*.json")
    assert (again.name, json.loads(again.read_text())) == (written.name, json.loads(written.read_text()))
    assert "vllm serve org/model --linear-backend triton" in out
    own = f"gemmpipe --config-dir={LIKE} export last vllm output=later model=org/model install=true"
    assert f": {own}" in out, "dense files must lie in the package"
    assert export(str(run_folder()), "plugin", "output=table") == 0
    out = capfd.readouterr().out
    assert "warning: plugin: no row can answer in an engine: no layer of an engine is a product of engine_like" in out
    table = pd.read_csv("table/engine_like_tuned_gemm.csv")
    pd.testing.assert_frame_equal(table, pd.read_csv("first/engine_like_tuned_gemm.csv"))
    assert f"GEMMPIPE_CONFIG_ENGINE_LIKE={Path('table').resolve()}/engine_like_tuned_gemm.csv" in out
    assert "engine_like_tuned_gemm.csv GEMMPIPE_VLLM=linear vllm serve" in out


@pytest.mark.e2e
def test_a_run_that_did_not_time_the_form_is_refused_with_the_command_that_does(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main([*TUNE, "format=[csv]"]) == 0
    capfd.readouterr()
    assert export("last", "vllm", "output=later") == 2
    _, error = capfd.readouterr().err.splitlines()  # what was read, the error
    assert not Path("later").exists(), "no file of a kernel that the engine does not have"
    command = f"reuse={run_folder().resolve()} 'format=[vllm]'"
    assert command in error
    assert f"gemmpipe --config-dir={LIKE} reuse=" in error
    older = run_folder()
    assert main([f"--config-dir={LIKE}", f"reuse={older}", "format=[vllm]"]) == 0
    assert export("last", "vllm", "output=later") == 0
    assert list(Path("later/vllm").glob("N=*.json"))
    timed = run_folder()
    assert timed != older
    capfd.readouterr()
    assert export(str(timed), "vllm", "output=a folder") == 0
    assert f" export {timed} vllm 'output=a folder' install=true\n" in capfd.readouterr().out


@pytest.mark.e2e
def test_an_engines_functions_are_left_out_on_a_cpu_and_no_run_there_is_suggested(
    capfd: pytest.CaptureFixture[str],
) -> None:
    small = ["kernel=a8w8_blockscale", "device=cpu", "shapes=list", "shapes.items=[[1,128,128]]"]
    assert main([*small, "format=[vllm]"]) == 2
    reason = "format: vllm: its functions cannot be timed here (no GPU: Triton compiles for GPUs)"
    assert f"{reason}; expected a GPU, or format=[csv]" in capfd.readouterr().err
    assert main([*small, "format=[csv,vllm]", "timer@stages.bench.timer=quick"]) == 0
    printed = capfd.readouterr()
    assert f"warning: {reason}: left out" in printed.err
    assert "engine: vllm" not in printed.out
    assert main(["export", "last", "vllm"]) == 2
    error = capfd.readouterr().err
    assert "which cannot run vllm's functions; expected a run on a GPU: gemmpipe kernel=a8w8_blockscale" in error
    assert "reuse=" not in error


@pytest.mark.e2e
def test_dense_files_are_installed_and_removed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TUNE, "format=[vllm]"]) == 0
    configs = Path("packages/vllm/model_executor/layers/quantization/utils/configs")
    configs.mkdir(parents=True)
    Path("packages/vllm/__init__.py").touch()
    assert export("last", "vllm", "install=true", "package=packages") == 0
    assert [path.name[:2] for path in configs.glob("N=*")] == ["N="]
    assert export("vllm", "undo=true", "package=packages") == 0
    assert list(configs.iterdir()) == []
    capfd.readouterr()
    assert export("last", "plugin") == 2
    assert "only an engine's function was timed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["last"], "export: last; expected gemmpipe export RUN|TABLE vllm|sglang|aiter|plugin"),
        (["vllm"], "export: vllm; expected gemmpipe export RUN|TABLE"),
        (["last", "vlm"], "expected gemmpipe export RUN|TABLE vllm|sglang|aiter|plugin; did you mean 'vllm'?\n"),
        (["last", "plugin", "install=true"], "plugin: nothing is installed for it"),
        (["last", "vllm", "install=maybe"], "install=maybe: expected true or false"),
        (["last", "vllm", "instal=true"], "instal: no such option; did you mean 'install'?"),
        (["nowhere", "vllm"], "no file or folder 'nowhere'"),
        (["lst", "vllm"], "a tuned table; did you mean 'last'?"),
        (["last", "vllm", "output=file"], "output=file: a file; expected the folder to write to"),
        (["last", "vllm"], "export: last: no finished run with choices under outputs/runs"),
        ([".", "vllm"], ".: no trials.jsonl there, expected the folder of a finished run"),
    ],
)
def test_a_wrong_line_is_one_line(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert main(["export", *arguments]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert len([text for text in error.splitlines() if not text.startswith("reading ")]) == 1


@pytest.mark.e2e
def test_a_merge_of_tables_points_to_export(h200_tables: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = h200_tables / "a8w8_blockscale_tuned_gemm.csv"
    assert main(["merge", f"inputs=[{table}]", "output=merged", "format=[vllm]"]) == 0
    assert "'gemmpipe export RUN vllm' writes those of a run" in capfd.readouterr().out
    assert not list(Path("merged").rglob("*.json"))


def test_a_table_has_no_times_of_an_engines_form(h200_tables: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = h200_tables / "a8w8_blockscale_tuned_gemm.csv"
    assert main(["export", str(table), "sglang"]) == 2
    expected = f"gemmpipe kernel=a8w8_blockscale shapes=csv shapes.path={table} 'format=[sglang]', which times it"
    error = capfd.readouterr().err
    assert expected in error
    assert error.endswith(" on a GPU (sm_90); this machine has none\n") or gpu_kind() is not None
    assert main(["export", str(table), "plugin"]) == 0
    assert f"GEMMPIPE_CONFIG_A8W8_BLOCKSCALE={table}" in capfd.readouterr().out
    assert main(["export", str(h200_tables / "bf16_tuned_gemm.csv"), "vllm"]) == 2
    assert "it reads no tuned files for products of a16w16" in capfd.readouterr().err


def test_the_kernel_of_a_table_with_a_name_of_its_own(h200_tables: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = Path("mine.csv").absolute()
    table.write_bytes((h200_tables / "bf16_tuned_gemm.csv").read_bytes())
    assert main(["export", str(table), "plugin"]) == 2
    error = capfd.readouterr().err
    assert "no table's name" in error
    assert "expected kernel=FAMILY, or a name such as tuned_fmoe.csv" in error
    assert main(["export", str(table), "plugin", "kernel=a16w16"]) == 0
    assert f"GEMMPIPE_CONFIG_A16W16={table}" in capfd.readouterr().out
    assert main(["export", str(table), "vllm", "kernel=a16w16"]) == 2
    assert f"expected 'gemmpipe export {table} kernel=a16w16 plugin'" in capfd.readouterr().err
    assert main(["export", str(table), "plugin", "kernel=a16w17"]) == 2
    assert capfd.readouterr().err.endswith("gemmpipe: kernel=a16w17: no such family; did you mean 'a16w16'?\n")


def _table(name: str, *rows: dict[str, object]) -> Path:
    """A native table of 16-bit products with torch's product, except for the cells of `rows`."""
    key = {"gfx": "gfx942", "cu_num": 304, "M": 1, "N": 1280, "K": 8192, "bias": False, "dtype": "torch.bfloat16"}
    key |= {"outdtype": "torch.bfloat16", "scaleAB": False, "bpreshuffle": False, "libtype": "torch", "splitK": 1}
    result = {"us": 4.5, "kernelName": "torch", "config": '{"method":"mm"}', "policy": "graph", "run_id": "r1"}
    pd.DataFrame([{**key, **result, **row} for row in rows]).to_csv(name, index=False)
    return Path(name)


def test_a_provisional_row_stays_provisional_in_aiters_table(capfd: pytest.CaptureFixture[str]) -> None:
    family = load_family("a16w16")
    rows = ({"M": 1, "policy": "graph shared_gpu"}, {"M": 2})
    assert main(["export", str(_table("bf16_tuned_gemm.csv", *rows)), "aiter", "output=out"]) == 0
    assert "warning: aiter: 1 of 2 rows is provisional (shared_gpu)" in capfd.readouterr().out
    written = Path("out/aiter/bf16_tuned_gemm.csv")
    provisional = {row["M"]: is_provisional(row["policy"]) for row in store.read(written, family)}
    assert provisional == {1: True, 2: False}
    alone = _table("alone_bf16_tuned_gemm.csv", {"M": 1, "us": 9.0}, {"M": 2})
    assert main(["export", str(alone), "aiter", "output=out"]) == 0
    assert "provisional (shared_gpu)" not in capfd.readouterr().err
    (first, *_) = store.read(written, family)
    assert first["us"] == 9.0, "a row that was timed alone replaces it"
    assert written.read_text().splitlines()[0].endswith(",tflops,bw"), "aiter's own columns suffice again"


def test_the_rows_of_a_table_that_an_engine_can_use_are_counted(
    h200_tables: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = Path("bf16_tuned_gemm.csv")
    ours = (h200_tables / table.name).read_text().splitlines()
    table.write_text("".join(f"{line}\n" for line in ours[:3]))
    assert main(["export", str(table), "plugin"]) == 0
    assert "\n2 of 2 rows can answer in an engine\n" in capfd.readouterr().out
    known = pd.read_csv(table, dtype=str)
    rows = [{"gfx": "gfx942", "cu_num": 304}, {"libtype": "flydsl", "M": "3"}]
    pd.DataFrame([*known.to_dict("records"), *({**known.iloc[0], **row} for row in rows)]).to_csv(table, index=False)
    assert main(["export", str(table), "plugin"]) == 0
    out = capfd.readouterr().out
    assert "2 of 4 rows can answer in an engine; not: of gfx942: the plug-ins need an NVIDIA GPU (1); " in out
    assert "backend: no 'flydsl' in this installation (1)" in out
    theirs = _table("theirs_bf16_tuned_gemm.csv", {"libtype": "asm", "config": None, "kernelName": "_ZN5a"})
    assert main(["export", str(theirs), "plugin"]) == 0
    assert "warning: plugin: 0 of 1 row can answer in an engine; not: of gfx942" in capfd.readouterr().out


def test_a_run_names_its_kernel(capfd: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    assert main(["export", "run", "plugin", "kernel=a16w16"]) == 2
    assert capfd.readouterr().err == "gemmpipe: export: kernel: only a table takes it; a run names its kernel\n"


PLAIN = (f"--config-dir={LIKE}", "device=cpu", "backend=[torch]", "timer@stages.bench.timer=quick", "executor=told")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


@pytest.mark.e2e
@pytest.mark.usefixtures("own_locks")
def test_a_runs_keys_are_numbers_and_flags_again(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of aiter's and of a native table: flags are no texts, and rows of the same key are united."""
    shapes = ("shapes=list", "shapes.items=[[[1,16],64,96]]")
    assert main(["kernel=a16w16", *shapes, *PLAIN, "space=a16w16", "output=tuned"]) == 0
    for _ in range(2):
        assert main(["export", "last", "aiter", "output=out"]) == 0, capfd.readouterr().err
        assert main(["export", "last", "plugin", "output=out"]) == 0
    capfd.readouterr()
    monkeypatch.setattr("gemmpipe.cli.export.fold_width", lambda stream: 80)
    assert main(["export", "last", "aiter", "output=out"]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert any(line.startswith("warning: aiter: all rows are of a CPU") for line in shown)
    assert any(line.startswith("merge: ") for line in shown)
    wide = [line for line in shown if len(line) > 80]
    assert [line for line in wide if "=" not in line and str(folder) not in line] == [], "paths and commands alone"
    theirs = (folder / "out" / "aiter" / "bf16_tuned_gemm.csv").read_text().splitlines()
    assert [line.split(",")[2:12] for line in theirs[1:]] == [
        [str(m), "64", "96", "False", *["torch.bfloat16"] * 2, "False", "False", "torch", "0"] for m in (1, 16)
    ]
    own = (folder / "out" / "bf16_tuned_gemm.csv").read_text()
    assert own == (folder / "tuned" / "bf16_tuned_gemm.csv").read_text()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (
            ["shapes=engine", "shapes.engine=sglang", "shapes.max_num_seqs=32"],
            ["python -m sglang.launch_server --model-path model --tp-size 2 --max-running-requests 32"],
        ),
        (
            ["shapes=model"],  # rows are those of one rank, whatever engine serves them
            [
                "vllm serve MODEL --tensor-parallel-size 2",
                "python -m sglang.launch_server --model-path MODEL --tp-size 2",
            ],
        ),
    ],
)
def test_the_server_of_the_run_is_launched(
    shapes: list[str], expected: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(LLAMA))
    more = ("kernel=a16w16", "shapes.nsets=[1]", "shapes.path=model", "shapes.tp=2", "output=tuned")
    assert main([*PLAIN, *shapes, *more]) == 0
    for model in ("", "org/model"):
        capfd.readouterr()
        assert export("last", "plugin", *([f"model={model}"] if model else [])) == 0
        lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("GEMMPIPE_CONFIG_")]
        launched = [line.partition("=linear ")[2] for line in lines]
        wanted = [text.replace("MODEL", model or "MODEL") for text in expected]
        assert launched == ([text.replace(" model ", f" {model} ") for text in wanted] if model else wanted)


def test_the_engines_library_that_a_run_did_not_time_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The recorded run had no DeepGEMM; where the engine has Triton, nothing is missing."""

    def missing(engine: str) -> Path:
        raise EnvironmentProblem(engine)

    monkeypatch.setattr("gemmpipe.engines.own_kernel.package_folder", missing)
    monkeypatch.setattr("gemmpipe.engines.own_kernel.installed_version", lambda engine: None)
    for name in ("SGLANG_ENABLE_JIT_DEEPGEMM", "VLLM_USE_DEEP_GEMM"):
        monkeypatch.delenv(name, raising=False)
    run = unpack(Path("recorded"))
    command = f"gemmpipe --config-dir={LIKE} shapes=engine shapes.engine=sglang shapes.path="
    for variable, model in (("1", "MODEL"), ("1", "org/model"), ("0", "MODEL")):
        monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", variable)
        own_kernel.cache_clear()
        assert export(str(run), "plugin", "output=table", *([f"model={model}"] if "/" in model else [])) == 0
        lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("not timed: ")]
        own = [line for line in lines if "SGLang" in line]
        expected = f"not timed: deepgemm, which SGLang itself calls; {command}{model} does"
        assert own == ([expected] if variable == "1" else [])
    own_kernel.cache_clear()


def test_batches_of_an_assumed_device_are_said(capfd: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(json.dumps(LLAMA))
    capture = ("capture", "kernel=a16w16", "shapes=engine", "shapes.path=config.json", "device=cpu")
    assumed = "  assumed: batches of a device with 24 GiB; shapes.memory_gib= gives that of the server's"
    assert main([*capture]) == 0
    assert assumed in capfd.readouterr().out.splitlines()
    assert main([*capture, "shapes.memory_gib=141"]) == 0
    assert "  assumed: " not in capfd.readouterr().out
