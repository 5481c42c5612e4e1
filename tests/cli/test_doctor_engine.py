"""`gemmpipe doctor engine=...`: the kernel of each kind of layer, by rules, by a log, and with a run's times."""

import json
import shlex
import tarfile
from pathlib import Path

import pandas as pd
import pytest

from gemmpipe.cli.main import main

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
Captured = pytest.CaptureFixture[str]

pytestmark = [pytest.mark.usefixtures("own_locks", "folder")]


def lines(capfd: Captured, *arguments: str) -> list[str]:
    assert main(["doctor", *arguments]) == 0
    return capfd.readouterr().out.splitlines()


def line_of(found: list[str], kind: str) -> str:
    return next(line for line in found if line.startswith(f"  {kind}"))


def test_by_rules(capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    found = lines(capfd, "engine=vllm", "target=sm_90", "version=0.25.1", "args=--moe-backend triton")
    assert found[0] == "vLLM 0.25.1 on sm_90"
    assert line_of(found, "linear fp8 by blocks").endswith("CUTLASS: reads no tuned files")
    assert "Triton: reads tuned files (--moe-backend triton)" in line_of(found, "experts fp8")
    assert any(line.endswith("Triton, which reads them: --linear-backend triton") for line in found)
    assert any("VLLM_USE_DEEP_GEMM=0" in line for line in found), "why DeepGEMM is passed over"
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM")
    found = lines(capfd, "engine=SGLang", "target=sm_90", "args=--fp8-gemm-backend=triton", "version=0.5.30")
    assert found[0] == "SGLang 0.5.30 on sm_90, rules of SGLang 0.5.23"
    assert "Triton: reads tuned files (--fp8-gemm-backend triton)" in line_of(found, "linear fp8 by blocks")
    found = lines(capfd, "engine=vllm", "target=gfx942")
    assert "the rules are for NVIDIA devices" in found[1]


def test_arguments_without_an_effect_are_named_with_what_may_be_meant(capfd: Captured) -> None:
    typed = "args=--tensor-parallel-size 4 --linear-backed triton --moe-backend triton"
    (printed,) = [line for line in lines(capfd, "engine=vllm", "target=sm_90", typed) if "no choice" in line]
    names = "--tensor-parallel-size, --linear-backed (did you mean '--linear-backend'?)"
    assert printed == f"  no choice here depends on {names}"
    assert not any("no choice" in line for line in lines(capfd, "engine=sglang", "target=sm_90", "args=--ep-size 4"))


@pytest.mark.parametrize("version", ["0.33", "v0.33.0", "0.33.1rc1+cu128", "0.5.9.post1"])
def test_versions_as_releases_write_them(version: str, capfd: Captured) -> None:
    first = lines(capfd, "engine=vllm", "target=sm_90", f"version={version}")[0]
    assert first.startswith(f"vLLM {version.removeprefix('v')} on sm_90")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_terminal_of_80_columns_is_wide_enough(engine: str, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmpipe.cli.doctor_engine.fold_width", lambda stream: 80)
    assert [line for line in lines(capfd, f"engine={engine}", "target=sm_120") if len(line) > 80] == []


def test_by_a_log(capfd: Captured) -> None:
    name = "N=1536,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    Path("server.log").write_text(
        "INFO [core.py:140] Initializing a V1 LLM engine (v0.33.0) with config: model='x'\n"
        "INFO [__init__.py:779] Selected DeepGemmFp8BlockScaledMMKernel for Fp8LinearMethod\n"
        "INFO [__init__.py:779] Selected CutlassFp8BlockScaledMMKernel for Fp8LinearMethod\n"
        f"WARNING [fp8_utils.py:955] Using default W8A8 Block FP8 kernel config. Config file not found at /v/{name}\n"
    )
    found = lines(capfd, "log=server.log")
    assert found[0] == "vLLM 0.33.0 on sm_90"
    assert "  sm_90 is the architecture of NVIDIA H200, which the log names; target= names another" in found
    assert "      other sizes: CUTLASS: reads no tuned files (the log's)" in found
    command = "gemmpipe kernel=a8w8_blockscale shapes=log shapes.path=server.log 'format=[vllm]'"
    assert f"  tunes what was missing: {command}" in found
    assert line_of(found, "linear fp8 by blocks").endswith("DeepGEMM: reads no tuned files (the log's)")
    assert "log: 0 tuned files read, 1 file not found" in found
    assert f"  missing {name}" in found
    assert "  no line of gemmpipe's plug-in for vLLM" in found


def test_a_table_names_its_device(h200_tables: Path, capfd: Captured) -> None:
    table = h200_tables / "a8w8_blockscale_tuned_gemm.csv"
    found = lines(capfd, "engine=vllm", f"run={table}", "version=0.25.1")
    assert found[0] == "vLLM 0.25.1 on sm_90"
    assert "  sm_90 is the device of the table; target= names another" in found
    (times,) = [line for line in found if line.startswith("times of ")]
    assert times.endswith(" products of linear fp8 by blocks, each counted once (no numbers of calls)")
    found = lines(capfd, "engine=vllm", f"run={table}", "version=0.25.1", "target=sm_100")
    assert found[-1] == f"times: those of {table} are of sm_90; expected sm_100"


def odd_table(h200_tables: Path, gfx: str = "sm_90") -> Path:
    """The shipped rows, the first one repeated with N = 1000 on an architecture."""
    rows = pd.read_csv(h200_tables / "a8w8_blockscale_tuned_gemm.csv", dtype=str, keep_default_na=False)
    more = rows.head(1).assign(N="1000", gfx=gfx)
    table = Path("a8w8_blockscale_tuned_gemm.csv")
    pd.concat([rows, more]).to_csv(table, index=False)
    return table


def test_sizes_that_a_kernel_lacks_have_the_next_one(h200_tables: Path, capfd: Captured) -> None:
    table = odd_table(h200_tables)
    sizes = len({*map(tuple, pd.read_csv(table)[["N", "K"]].to_numpy())})
    found = lines(capfd, "engine=vllm", "target=sm_90", "version=0.25.1", f"run={table}")
    assert line_of(found, "linear fp8 by blocks").endswith(f"reads no tuned files ({sizes - 1} of {sizes} sizes)")
    at = found.index(f"      1 of {sizes} sizes: CUTLASS: reads no tuned files")
    k = pd.read_csv(table).iloc[-1]["K"]
    assert found[at + 1] == f"          not FlashInfer for M < 32, DeepGEMM above: N % 64 or K % 128: N=1000 K={k}"
    found = lines(capfd, "engine=sglang", "target=sm_90", f"run={table}")
    assert f"      1 of {sizes} sizes: Triton: reads tuned files" in found


BLOCK_SCALED = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}


def test_the_layers_of_a_model(capfd: Captured) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(BLOCK_SCALED))
    given = ("engine=vllm", "target=sm_90", "version=0.25.1", "model=model")
    found = lines(capfd, *given)
    assert line_of(found, "linear fp8 by blocks").endswith("DeepGEMM above: reads no tuned files")
    assert line_of(found, "linear bf16").endswith("torch (cuBLAS): reads no tuned files"), "the output embedding"
    assert line_of(found, "linear fp8 by row") == "  linear fp8 by row      none in the model"
    assert line_of(found, "experts bf16").endswith("none in the model")
    command = "gemmpipe shapes=engine shapes.engine=vllm shapes.path=model"
    assert f"tunes its products, vLLM's own library among the candidates: {command}" in found
    assert not any("kernel=fmoe" in line for line in found), "a model without experts"
    assert main(["doctor", "engine=vllm", "target=sm_90", "model=nowhere"]) == 2
    assert capfd.readouterr().err == "gemmpipe: model: no file 'nowhere', expected a model's config.json\n"
    assert main(["doctor", *given, "args=--tensor-parallel-size 2"]) == 2
    assert "128" in capfd.readouterr().err, "blocks of scales do not divide among 2 devices"
    assert main(["doctor", *given, "args=--tensor-parallel-size two"]) == 2
    assert capfd.readouterr().err == "gemmpipe: args: --tensor-parallel-size two: expected a whole number from 1\n"


def test_a_models_experts_have_a_command_and_the_method_of_their_dtype(capfd: Captured) -> None:
    mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    sixteen = {name: value for name, value in BLOCK_SCALED.items() if name != "quantization_config"}
    Path("mixture.json").write_text(json.dumps({**sixteen, **mixture, "architectures": ["Qwen3MoeForCausalLM"]}))
    found = lines(capfd, "engine=sglang", "target=sm_90", "model=mixture.json")
    at = found.index(line_of(found, "experts bf16"))
    assert found[at + 1].endswith("sglang/srt/layers/quantization/unquant.py"), "the file of fp8 is not read for bf16"
    command = "gemmpipe kernel=fmoe shapes=engine shapes.engine=sglang shapes.path=mixture.json"
    assert f"tunes its experts: {command}" in found
    assert main(shlex.split(command.replace("gemmpipe", "capture"))) == 0
    assert "1 product" in capfd.readouterr().out


def test_experts_that_no_kernel_of_ours_computes_are_named(capfd: Captured) -> None:
    mixture = {"num_local_experts": 32, "experts_per_token": 4, "quantization_config": {"quant_method": "mxfp4"}}
    config = {**BLOCK_SCALED, **mixture, "architectures": ["GptOssForCausalLM"]}
    ignored = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    Path("gpt_oss.json").write_text(json.dumps({**config, "quantization_config": ignored}))
    found = lines(capfd, "engine=vllm", "target=sm_90", "version=0.25.1", "model=gpt_oss.json")
    experts = line_of(found, "experts, MXFP4 weights")
    assert experts.endswith("no kernel of ours computes them (biases and a clamped SwiGLU)")
    assert not any("kernel=fmoe" in line for line in found)
    (tunes,) = (line.rpartition(": gemmpipe ")[2] for line in found if line.startswith("tunes its products"))
    assert main(["capture", *shlex.split(tunes), "shapes.nsets=[1]"]) == 0, "the command is one that works"
    assert "the experts (no kernel of ours: biases and a clamped SwiGLU)" in capfd.readouterr().out


def test_experts_of_two_kinds_and_over_devices(h200_tables: Path, capfd: Captured) -> None:
    given = ("engine=vllm", f"run={h200_tables / 'tuned_fmoe.csv'}")
    rows = pd.read_csv(h200_tables / "tuned_fmoe.csv")
    by_blocks = int(rows["q_type"].str.contains("1x128").sum())
    assert 0 < by_blocks < len(rows)
    found = lines(capfd, *given)
    times = [line.partition(": us of ")[2] for line in found if line.startswith("times of ")]
    counts = (by_blocks, len(rows) - by_blocks)
    kinds = ("experts fp8 by blocks", "experts bf16")
    assert [text.partition(",")[0] for text in times] == [
        f"{n} products of {k}" for n, k in zip(counts, kinds, strict=True)
    ]
    assert sum(line.startswith("fastest: ") for line in found) == 2
    found = lines(capfd, *given, "args=--enable-expert-parallel -tp 2")
    assert not any(line.startswith("fastest: ") for line in found)
    assert found[-1] == "gemmpipe's plug-in leaves experts that are spread over devices to vLLM"


def test_times_of_a_models_sizes_alone(h200_tables: Path, capfd: Captured) -> None:
    table = h200_tables / "a8w8_blockscale_tuned_gemm.csv"
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    Path("served").mkdir()
    Path("served/config.json").write_text(json.dumps({**BLOCK_SCALED, **sizes}))
    given = ("engine=vllm", f"run={table}", "model=served")
    found = lines(capfd, *given, "args=-tp 8 --linear-backend triton --max-num-seqs 64")
    assert f"{table} has rows for 4 of the model's 4 sizes of linear fp8 by blocks" in found
    (tunes,) = [line for line in found if line.startswith("tunes its products, ")]
    assert tunes.endswith(": gemmpipe shapes=engine shapes.engine=vllm shapes.path=served shapes.tp=8")
    (times,) = [line for line in found if line.startswith("times of ")]
    rows = pd.read_csv(table)
    sizes_of_a_rank = {(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)}
    mine = [pair for pair in zip(rows.N, rows.K, strict=True) if pair in sizes_of_a_rank]
    assert f": us of {len(mine)} products of linear fp8 by blocks, " in times
    assert found[-1].endswith(" vllm serve served -tp 8 --max-num-seqs 64"), (
        "without the flag that the plug-in replaces"
    )
    assert lines(capfd, *given)[-1] == f"{table} has rows for 0 of the model's 4 sizes of linear fp8 by blocks"


def test_a_table_of_two_devices_asks_for_one(h200_tables: Path, capfd: Captured) -> None:
    table = odd_table(h200_tables, gfx="sm_100")
    assert main(["doctor", "engine=vllm", f"run={table}"]) == 3
    assert capfd.readouterr().err.endswith(
        "with the architecture of the server's GPU (target=sm_100); the table has rows of sm_100, sm_90\n"
    )
    found = lines(capfd, "engine=vllm", f"run={table}", "target=sm_100")
    (times,) = [line for line in found if line.startswith("times of ")]
    assert ": us of 1 product of linear fp8 by blocks, " in times


@pytest.mark.e2e
def test_with_the_times_of_a_run(capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([*TUNE, "format=[csv,vllm]"]) == 0
    capfd.readouterr()
    given = ("engine=vllm", "target=sm_90", "version=0.33.0", "args=--linear-backend triton", "run=last")
    assert main([f"--config-dir={LIKE}", "doctor", *given]) == 0
    refused = capfd.readouterr().out.splitlines()[-1]
    assert refused.startswith("times: those of ")
    assert refused.endswith("; expected sm_90"), "times of a CPU decide nothing for a GPU"
    monkeypatch.setattr("gemmpipe.pipeline.export.architectures_of", lambda choices: ("sm_90",))
    assert main([f"--config-dir={LIKE}", "doctor", *given]) == 0
    found = capfd.readouterr().out.splitlines()
    titles = [
        line.split("  ")[1] for line in found if line.startswith("  ") and line[2:3] in "vtb" and "." in line[40:]
    ]
    assert sorted(titles) == [
        "backend torch alone",
        "the baseline: the best library without more memory",
        "tuned rows, through gemmpipe's plug-in",
        "vLLM's Triton function as it is",
        "vLLM's Triton function with the run's file",
    ]
    assert next(line for line in found if "as it is" in line).endswith("the engine's choice now")
    own = next(line for line in found if line.startswith("fastest of the engine's own kernels: "))
    assert "vllm install=true; vllm serve MODEL --linear-backend triton" in own


def test_a_run_whose_table_is_no_longer_there(capfd: Captured) -> None:
    with tarfile.open(Path(__file__).parents[2] / "docs/examples/h200_run.tar.xz") as archive:
        archive.extractall(filter="data")
    found = lines(capfd, "engine=vllm", "version=0.25.1", "run=h200_run")
    assert "  sm_90 is the device of the run; target= names another" in found
    (times,) = [line for line in found if line.startswith("times of ")]
    assert times.endswith(" products of linear fp8 by blocks, weighted by calls")
    command = "gemmpipe export h200_run plugin output=serve"
    assert found[-1] == f"fastest: {command}, which writes the table again and prints the launch line"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["engine=vlm"], 2, "engine: 'vlm' is no engine; expected vllm or sglang; did you mean 'vllm'?\n"),
        (["engin=vllm"], 2, "doctor: engin: no such option; did you mean 'engine'?"),
        (["engine=vllm", "target=sm_90", "model=nowhere"], 2, "no file 'nowhere', expected a model's config.json"),
        (["engine=vllm", "target=sm_90", "model=a/b-8B"], 2, "hf download a/b-8B config.json --local-dir a/b-8B"),
        (["model=nowhere"], 2, "doctor: model: an option of doctor engine=vllm and engine=sglang; expected engine="),
        (["engine=vllm", "targte=sm_90"], 2, "doctor: targte: no such option; did you mean 'target'?"),
        (["engine=vllm", "target=sm_90", "args=--x 'y z"], 2, "No closing quotation; expected a server's arguments"),
        (["engine=vllm", "target=sm_99"], 2, "target: 'sm_99' is not known; expected an architecture such as sm_80"),
        (["engine=vllm", "target=sm90"], 2, "did you mean 'sm_90'?"),
        (["engine=vllm", "target=sm_90", "version=abc"], 2, "version: 'abc' given; expected numbers such as 0.33.0"),
        (["engine=vllm", "target=sm_90", "args=triton"], 2, "args: 'triton' given first; expected arguments such as"),
        (["target=sm_90"], 2, "doctor: target: an option of doctor engine=vllm and engine=sglang; expected engine="),
        (["kernel=a16w16", "version=0.33.0"], 2, "doctor: version: an option of doctor engine=vllm"),
        (["engine=vllm", "target=sm_90", "package=."], 2, "package=.: no package 'vllm' there"),
        (
            ["engine=vllm", "target=sm_90", "log=absent.log"],
            2,
            "log=absent.log: no such file; expected the log",
        ),
        (["engine=vllm", "target=sm_90", "run=nowhere"], 2, "doctor: no file or folder 'nowhere'"),
        (
            ["engine=vllm", "target=sm_90", "kernel=a16w16"],
            2,
            "doctor: kernel: of a table alone; expected run=TABLE too",
        ),
    ],
)
def test_a_wrong_line_is_one_line(arguments: list[str], code: int, message: str, capfd: Captured) -> None:
    assert main(["doctor", *arguments]) == code
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1
