"""`shapes=engine`: the layers and the row counts of a server, against the collected products of real models."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_configs import QWEN_8B

from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.request import with_kernel_of_shapes
from gemmpipe.core.errors import EnvironmentProblem, UserError
from gemmpipe.engines.own_kernel import own_kernel
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.sources.model.engine import EngineShapes, family_of_checkpoint, served_model
from gemmpipe.sources.model.source import ModelShapes

DATA = Path(__file__).parents[3] / "shared" / "data" / "model_configs"
NOTHING = KernelDefaults(dtype=None, out_dtype=None, bias=None)
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "hidden_act": "silu",
}
PLAIN = {
    "path": None,
    "config": QWEN_8B,
    "tp": 1,
    "ep": 1,
    "nsets": "engine",
    "quantization": "config",
    "engine": "vllm",
    "own_kernel": True,
    "max_num_seqs": None,
    "max_num_batched_tokens": None,
    "capture_sizes": None,
    "max_capture_size": None,
    "prefill": "powers",
    "memory_gib": None,
}


def source(**fields: object) -> EngineShapes:
    return EngineShapes(**{**PLAIN, **fields})  # type: ignore[arg-type]


def row_counts(layer: str = "qkv_proj", gfx: str = "sm_90", **fields: object) -> list[int]:
    problems = source(**fields).problems(load_family("a16w16"), NOTHING, gfx)
    return [problem.rows for problem in problems if problem.layer == layer]


def test_vllm_captures_to_512_and_prefills_in_steps_of_8192_tokens() -> None:
    found = row_counts()
    assert found[:6] == [1, 2, 4, 8, 16, 24]
    assert {240, 248, 256, 272, 496, 512} <= set(found)
    assert not {255, 264, 528, 640} & set(found)
    assert found[-4:] == [1024, 2048, 4096, 8192]


def test_sglang_captures_to_256_or_512() -> None:
    found = row_counts(engine="sglang")
    assert found[:7] == [1, 2, 4, 8, 12, 16, 24]
    assert found[-6:] == [256, 512, 1024, 2048, 4096, 8192]
    found = row_counts(engine="sglang", tp=4)
    assert {272, 496, 512} <= set(found)


def test_arguments_of_the_server_limit_the_batches() -> None:
    assert row_counts(max_num_seqs=4, max_num_batched_tokens=64) == [1, 2, 4, 8, 16, 32, 64]
    assert row_counts(capture_sizes=[1, 3], prefill="none") == [1, 3]
    assert row_counts(engine="sglang", max_num_seqs=6, prefill="none") == [1, 2, 4, 6]
    assert row_counts(nsets=[7]) == [7]
    captured = row_counts(engine="sglang", prefill="captured")
    assert {288, 1280, 8192} <= set(captured)


def test_the_output_embedding_has_a_row_per_request() -> None:
    assert row_counts("lm_head", max_num_seqs=4, max_num_batched_tokens=64) == [1, 2, 4]
    assert max(row_counts("lm_head")) == 1024


def test_sglang_computes_deepseeks_shared_expert_as_a_routed_one() -> None:
    fused = source(config=V3, engine="sglang", tp=8, nsets=[16], quantization="ignore")
    (problem,) = fused.problems(load_family("fmoe"), NOTHING, "sm_90")
    assert (problem["expert"], problem["topk"]) == (257, 9)
    layers = {linear.layer for linear in fused.linears(V3, "", batched=False)}
    assert not [layer for layer in layers if layer.startswith("shared_experts")]
    for other in (
        source(config=V3, engine="vllm", tp=8),
        source(config=V3, engine="sglang", tp=8, ep=8),
        source(config={**V3, "n_routed_experts": 160}, engine="sglang", tp=8),
    ):
        assert other.config is not None
        layers = {linear.layer for linear in other.linears(other.config, "", batched=False)}
        assert "shared_experts.gate_up_proj" in layers


@pytest.mark.skipif(not DATA.exists(), reason="collected model configurations not here")
def test_against_the_collected_products() -> None:
    with (DATA / "expected_gemms.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    expected: dict[tuple[str, int], dict[str, tuple[int, int, int]]] = {}
    for row in rows:
        shapes = expected.setdefault((row["model"], int(row["tp"])), {})
        shapes[row["role"]] = (int(row["N"]), int(row["K"]), int(row["layers"]))
    fused = {"DeepSeek-V3", "GLM-4.5-Air"}
    for (model, tp), shapes in expected.items():
        if (model, tp) == ("Phi-4", 8):  # engines refuse its 10 KV heads
            continue
        config = json.loads((DATA / f"{model}.json").read_text())
        for engine in ("vllm", "sglang"):
            listed = source(config=config, tp=tp, engine=engine).linears(config, model, batched=False)
            found = {x.layer: (x.n, x.k, x.calls) for x in listed}
            if engine == "sglang" and model in fused:
                assert found == {k: v for k, v in shapes.items() if not k.startswith("shared_experts")}, (model, tp)
            else:
                assert found == shapes, (model, tp, engine)


@pytest.mark.skipif(not DATA.exists(), reason="collected model configurations not here")
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        *((name, "") for name in ("DeepSeek-V3", "GLM-4.5-Air", "Mixtral-8x7B", "Qwen3-30B-A3B")),
        ("gpt-oss-20b", "biases and a clamped SwiGLU"),
        *((name, None) for name in ("Llama-3.1-8B", "Phi-4", "Qwen3-32B-FP8", "Qwen3-8B")),
    ],
)
def test_every_mixture_of_experts_is_one(model: str, reason: str | None) -> None:
    """The same for `doctor model=`, for `shapes=model` and for `shapes=engine`."""
    path = DATA / f"{model}.json"
    assert served_model("vllm", str(path), 1, 1, "sm_90").experts == reason
    plain = {"path": None, "config": json.loads(path.read_text()), "tp": 1, "ep": 1, "nsets": [1]}
    for listed in (source(config=plain["config"]), ModelShapes(**plain, quantization="config")):
        assert listed.experts_reason("sm_90") == reason
        text = listed.left_out(load_family("a16w16"), NOTHING, "sm_90")
        said = "" if reason is None else f"the experts (no kernel of ours: {reason})" if reason else "(kernel=fmoe)"
        assert (said in text) and (reason is not None or "experts" not in text)


def test_a_checkpoint_in_16_bits_needs_no_other_kernel() -> None:
    block = load_family("a8w8_blockscale")
    with pytest.raises(UserError, match=r"kernel=a8w8_blockscale: shapes\.config has no quantization_config: .*a16w16"):
        source().problems(block, NOTHING, "sm_90")
    assert source(quantization="ignore", nsets=[1]).problems(block, NOTHING, "sm_90")


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
QWEN_8B_FP8 = {**QWEN_8B, "quantization_config": BLOCKS}


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No engine in this Python: those packages are assumed that it requires."""

    def missing(engine: str) -> Path:
        raise EnvironmentProblem(engine)

    monkeypatch.setattr("gemmpipe.engines.own_kernel.package_folder", missing)
    monkeypatch.setattr("gemmpipe.engines.own_kernel.installed_version", lambda engine: None)
    for name in ("SGLANG_ENABLE_JIT_DEEPGEMM", "VLLM_USE_DEEP_GEMM", "VLLM_DISABLED_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    own_kernel.cache_clear()
    yield
    own_kernel.cache_clear()


def orders(family: str, defaults: KernelDefaults, gfx: str = "sm_90", **fields: object) -> set[object]:
    found = source(**{"config": QWEN_8B_FP8, "nsets": [1, 64], **fields}).problems(load_family(family), defaults, gfx)
    return {dict(problem.key).get("x_scale") for problem in found}


@pytest.mark.parametrize(
    ("engine", "libraries"), [("sglang", ("deepgemm",)), ("vllm", ("flashinfer", "deepgemm"))], ids=["sglang", "vllm"]
)
def test_the_engines_own_library_and_order_of_scales(
    not_installed: None, engine: str, libraries: tuple[str, ...]
) -> None:
    block = load_family("a8w8_blockscale")
    assert orders("a8w8_blockscale", NOTHING, engine=engine) == {"column"}
    own = source(config=QWEN_8B_FP8, nsets=[1], engine=engine)
    assert own.engine_libraries(block, NOTHING, "sm_90") == libraries
    for gfx in ("cpu_avx2", "sm_100", "gfx942"):  # not known there
        assert orders("a8w8_blockscale", NOTHING, gfx, engine=engine) == {None}
        assert own.engine_libraries(block, NOTHING, gfx) == ()
    assert orders("a8w8_blockscale", NOTHING, engine=engine, own_kernel=False) == {None}
    without = source(config=QWEN_8B_FP8, nsets=[1], engine=engine, own_kernel=False)
    assert without.engine_libraries(block, NOTHING, "sm_90") == ()


def test_experts_are_counted_with_vllms_own_function(not_installed: None) -> None:
    experts = load_family("fmoe")
    assert source(config=V3, nsets=[1]).engine_libraries(experts, NOTHING, "sm_90") == ("vllm_function",)
    assert source(config=V3, nsets=[1], engine="sglang").engine_libraries(experts, NOTHING, "sm_90") == ()
    assert source(config=V3, nsets=[1], own_kernel=False).engine_libraries(experts, NOTHING, "sm_90") == ()


def test_an_order_that_the_user_gives_is_kept(not_installed: None) -> None:
    given = KernelDefaults(dtype=None, out_dtype=None, bias=None, key={"x_scale": "row"})
    assert orders("a8w8_blockscale", given, engine="sglang") == {"row"}


def test_products_in_16_bits_have_no_other_library(not_installed: None) -> None:
    plain = source(engine="sglang", nsets=[1])
    assert plain.engine_libraries(load_family("a16w16"), NOTHING, "sm_90") == ()


def test_where_the_engine_has_triton_scales_lie_in_rows(not_installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
    own_kernel.cache_clear()
    assert orders("a8w8_blockscale", NOTHING, engine="sglang") == {"row"}
    own = source(config=QWEN_8B_FP8, nsets=[1], engine="sglang")
    assert own.engine_libraries(load_family("a8w8_blockscale"), NOTHING, "sm_90") == ()


def test_sizes_that_sglangs_function_leaves_to_triton(not_installed: None) -> None:
    rules = {n: own_kernel("sglang", "linear fp8 by blocks", "sm_90", (n, 4096)) for n in (6144, 6144 + 16)}
    assert [rule.scales for rule in rules.values() if rule is not None] == ["column", "row"]


def test_the_engines_packages_decide_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    monkeypatch.setattr("gemmpipe.engines.own_kernel.package_folder", lambda engine: package)
    monkeypatch.setattr("gemmpipe.engines.own_kernel.installed_version", lambda engine: "0.5.23")
    monkeypatch.delenv("SGLANG_ENABLE_JIT_DEEPGEMM", raising=False)
    names = []
    for made in ((), ("deep_gemm",)):
        for name in made:
            (tmp_path / name).mkdir()
        own_kernel.cache_clear()
        rule = own_kernel("sglang", "linear fp8 by blocks", "sm_90", (6144, 4096))
        names.append("" if rule is None else rule.title)
    own_kernel.cache_clear()
    assert names == ["Triton", "DeepGEMM"]


def test_the_kernel_of_a_checkpoint(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    for fields, family in (({}, "a16w16"), ({"quantization_config": fp8}, "a8w8_blockscale")):
        (tmp_path / "config.json").write_text(json.dumps({**QWEN_8B, **fields}))
        assert family_of_checkpoint(tmp_path) == family
        overrides = ("shapes=engine", f"shapes.path={tmp_path}")
        assert with_kernel_of_shapes(overrides, ConfigFolders(config_dir=None)) == (f"kernel={family}", *overrides)
    assert family_of_checkpoint(tmp_path / "absent") is None
    given = ("kernel=fmoe", *overrides)
    assert with_kernel_of_shapes(given, ConfigFolders(config_dir=None)) == given


def test_what_a_server_refuses() -> None:
    with pytest.raises(UserError, match=r"shapes.ep: 4; vLLM's expert parallelism has shapes.tp=8 devices"):
        source(config=V3, tp=8, ep=4).linears(V3, "", batched=False)
    with pytest.raises(ValueError, match="max_num_seqs=0, expected"):
        source(max_num_seqs=0)
    with pytest.raises(UserError, match=r"shapes\.nsets: 'server'"):
        row_counts(nsets="server")


@pytest.mark.parametrize(
    ("fields", "command"),
    [
        ({"path": "org/model"}, "vllm serve org/model"),
        (
            {"path": "dir/config.json", "tp": 8, "ep": 8, "max_num_seqs": 64, "capture_sizes": [1, 2]},
            "vllm serve dir --tensor-parallel-size 8 --max-num-seqs 64 --cudagraph-capture-sizes 1 2 "
            "--enable-expert-parallel",
        ),
        (
            {"engine": "sglang", "tp": 4, "ep": 2, "max_capture_size": 32, "max_num_batched_tokens": 4096},
            "python -m sglang.launch_server --model-path MODEL --tp-size 4 --ep-size 2 --chunked-prefill-size 4096 "
            "--cuda-graph-max-bs-decode 32",
        ),
    ],
)
def test_the_launch_line(fields: dict[str, object], command: str) -> None:
    assert source(**fields).server().command(()) == command
