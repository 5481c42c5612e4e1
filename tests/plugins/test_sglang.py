"""SGLang's plug-in on its real hook registry and its real functions: rows answer, all else is SGLang's own."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import sglang_stand_in
import torch
from engine_sources import definition, source_of
from sglang_stand_in import FUSED_MOE, QUANTIZATION, Sglang, block_linear, install
from torch.nn.functional import linear

from gemmpipe.launch.replays import restore_replays
from gemmpipe.plugins import sglang, sglang_linear
from gemmpipe.plugins.engine_dispatch import EngineKernel
from gemmpipe.plugins.sglang import HOOKS, register, unsupported_sglang
from gemmpipe.plugins.sglang_blocks import block_kernel, libraries_of
from gemmpipe.plugins.sglang_experts import experts_reason
from gemmpipe.plugins.sglang_linear import block_layer_reason, forget_rows
from gemmpipe.plugins.sglang_notice import SGLANG_NOTICE
from gemmpipe.runtime import dispatch_report

VERSIONS = ("0.5.20", "0.5.23")
N, K, BF16 = 256, 256, torch.bfloat16


@pytest.fixture(params=VERSIONS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sglang:
    monkeypatch.setattr(sglang, "_DONE", [])
    # On a CPU torch's rows alone can run: here they are another library than SGLang's.
    monkeypatch.setattr(
        sglang_linear, "EngineKernel", lambda **fields: EngineKernel(**{**fields, "libtypes": frozenset()})
    )
    forget_rows()
    return install(request.param, monkeypatch)


def start(engine: Sglang) -> None:
    register()
    engine.apply_hooks()


def x_of(m: int, k: int = K) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()


def weight(*shape: int) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(5)) * shape[-1] ** -0.5
    return made.bfloat16()


def unquantised(engine: Sglang) -> tuple[object, SimpleNamespace]:
    method = engine.modules[f"{QUANTIZATION}.unquant"].UnquantizedLinearMethod()  # type: ignore[attr-defined]
    return method, SimpleNamespace(weight=weight(N, K))


DEEPGEMM = "deepgemm_w8a8_block_fp8_linear_with_fallback"


def blocks(
    engine: Sglang, name: str = "triton_w8a8_block_fp8_linear", n: int = N, **options: bool
) -> tuple[object, SimpleNamespace]:
    method = engine.modules[f"{QUANTIZATION}.fp8"].Fp8LinearMethod()  # type: ignore[attr-defined]
    made = {"use_marlin": False, "use_mxfp8": False, "block_quant": True, "weight_block_size": [128, 128]}
    function = block_linear(engine, name)
    function = partial(function, **options) if options else function
    vars(method).update(made, block_fp8_as_mxfp8=False, w8a8_block_fp8_linear=function)
    w = weight(n, K)
    scale = torch.full((-(-n // 128), K // 128), 0.01)
    layer = SimpleNamespace(weight=(w.float() / 0.01).to(torch.float8_e4m3fn), weight_scale_inv=scale)
    return method, layer


def test_a_linear_layer_dispatches_each_m(engine: Sglang, rows, caplog) -> None:
    rows("a16w16", "torch", {"method": "float32_convert"}, *({"M": m, "N": N, "K": K} for m in (1, 16)))
    method, layer = unquantised(engine)
    caplog.set_level(logging.INFO)
    start(engine)
    for m in (1, 9, 16, 40):  # 9 is padded to 16, 40 has no row
        out = method.apply(layer, x_of(m))  # type: ignore[attr-defined]
        assert torch.equal(out, linear(x_of(m).float(), layer.weight.float()).to(BF16)) or m == 40
    assert engine.calls == ["linear"]
    assert torch.equal(method.apply(layer, x_of(40)), linear(x_of(40), layer.weight))  # type: ignore[attr-defined]
    assert method.apply(layer, x_of(8).view(2, 4, K)).shape == (2, 4, N)  # type: ignore[attr-defined]
    (line,) = [text for text in caplog.messages if text.startswith("gemmpipe ")]
    assert f"in SGLang {engine.version}" in line
    assert "takes over linear bf16 (2 rows for 1 sizes)" in line


def test_a_row_of_torch_is_answered_by_sglangs_own_call(engine: Sglang, rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_linear, "EngineKernel", EngineKernel)
    rows("a16w16", "torch", {"method": "float32_convert"}, {"M": 4, "N": N, "K": K})
    method, layer = unquantised(engine)
    start(engine)
    assert torch.equal(method.apply(layer, x_of(4)), linear(x_of(4), layer.weight))  # type: ignore[attr-defined]
    assert engine.calls == ["linear"]


def test_a_layer_without_rows_is_sglangs(engine: Sglang, rows) -> None:
    rows("a16w16", "torch", {"method": "mm"}, {"M": 1, "N": 2 * N, "K": K})
    method, layer = unquantised(engine)
    start(engine)
    bias = torch.ones(N, dtype=BF16)
    for m in (1, 2):
        assert torch.equal(method.apply(layer, x_of(m), bias), linear(x_of(m), layer.weight, bias))  # type: ignore[attr-defined]
    assert engine.calls == ["linear"] * 2


def test_fp8_by_blocks(engine: Sglang, rows) -> None:
    rows("a8w8_blockscale", "torch", {"method": "bfloat16_convert"}, {"M": 4, "N": N, "K": K})
    method, layer = blocks(engine)
    start(engine)
    wide = layer.weight.float() * 0.01
    for m in (4, 8):
        for _ in range(2):
            out = method.apply(layer, x_of(m))  # type: ignore[attr-defined]
            expected = linear(x_of(m).float(), wide)
            assert (out.float() - expected).norm() < 0.05 * expected.norm()  # fp8 rounds by up to 6 %
    assert engine.calls == ["blocks"] * 2, "M 8 has no row"
    bias = torch.ones(N, dtype=BF16)
    method.apply(layer, x_of(4), bias)  # type: ignore[attr-defined]
    assert engine.calls == ["blocks"] * 3, "a bias is SGLang's"


@pytest.mark.parametrize(
    ("name", "n", "options", "strides"),
    [
        (DEEPGEMM, N, {}, {1: (2, 1), 3: (1, 4), 4: (1, 4), 9: (1, 12)}),
        ("flashinfer_deepgemm_w8a8_block_fp8_linear_with_fallback", N, {}, {3: (1, 4)}),
        ("cutlass_w8a8_block_fp8_linear_with_fallback", N, {}, {3: (1, 4)}),
        (DEEPGEMM, N + 16, {}, {1: (2, 1), 3: (2, 1)}),  # sizes that it leaves to Triton
        (DEEPGEMM, N, {"act_scale_ue8m0": True}, {3: (2, 1)}),
        ("triton_w8a8_block_fp8_linear", N, {}, {1: (2, 1), 3: (2, 1), 4: (2, 1)}),
    ],
)
def test_x_is_quantised_in_the_order_of_sglangs_function(engine: Sglang, rows, name, n, options, strides) -> None:
    """A single row has no gaps: its rows are tuned so."""
    keys = [{"M": m, "N": n, "K": K} for m in strides]
    rows("a8w8_blockscale", "torch", {"method": "bfloat16_convert"}, *keys)
    method, layer = blocks(engine, name, n, **options)
    start(engine)
    wide = layer.weight.float() * 0.01
    for m, expected in strides.items():
        engine.scales.clear()
        out, exact = method.apply(layer, x_of(m)).float(), linear(x_of(m).float(), wide)  # type: ignore[attr-defined]
        assert {scale.stride() for scale in engine.scales} == {expected}
        assert (out - exact).norm() < 0.05 * exact.norm()
        if options:
            assert all(torch.equal(scale.log2(), scale.log2().round()) for scale in engine.scales)
    assert engine.calls == []


def test_a_row_for_the_other_order_of_scales_is_not_used(engine: Sglang, rows) -> None:
    keys = [{"M": 4, "N": N, "K": K, "x_scale": "row"}, {"M": 8, "N": N, "K": K, "x_scale": "column"}]
    rows("a8w8_blockscale", "torch", {"method": "bfloat16_convert"}, *keys)
    method, layer = blocks(engine, DEEPGEMM)
    start(engine)
    for m in (4, 8):
        method.apply(layer, x_of(m))  # type: ignore[attr-defined]
    assert list(dispatch_report().values()) == ["engine", "exact"]
    assert engine.calls == ["blocks"]


@pytest.mark.parametrize(("order", "said"), [("row", True), ("column", False), (None, False)])
def test_rows_for_the_other_order_alone_are_said(engine: Sglang, rows, caplog, order: str | None, said: bool) -> None:
    key = {"N": N, "K": K, **({"x_scale": order} if order else {})}
    rows("a8w8_blockscale", "torch", {"method": "bfloat16_convert"}, {"M": 1, **key}, {"M": 4, **key})
    caplog.set_level(logging.INFO)
    method, layer = blocks(engine, DEEPGEMM)
    start(engine)
    for m in (1, 4):
        method.apply(layer, x_of(m))  # type: ignore[attr-defined]
    text = "for more than one token its rows have x_scale=row, SGLang's function column"
    assert (text in caplog.text) is said
    assert list(dispatch_report().values()) == ["exact", "engine" if said else "exact"], "one row has both orders"


@pytest.mark.parametrize(
    ("name", "libtype", "own"),
    [
        (DEEPGEMM, "deepgemm", True),
        ("flashinfer_deepgemm_w8a8_block_fp8_linear_with_fallback", "deepgemm", True),
        ("flashinfer_gemm_w8a8_block_fp8_linear_with_fallback", "flashinfer", True),
        ("cutlass_w8a8_block_fp8_linear_with_fallback", "vllm_cutlass", True),
        ("triton_w8a8_block_fp8_linear", "triton", False),
        (DEEPGEMM, "gluon", False),
    ],
)
def test_the_libraries_of_sglangs_functions(name: str, libtype: str, own: bool) -> None:
    assert (libtype in libraries_of(name)) is own


def test_a_row_of_sglangs_library_is_answered_by_its_own_call(engine: Sglang, rows, monkeypatch, caplog) -> None:
    monkeypatch.setattr("gemmpipe.plugins.sglang_blocks.libraries_of", lambda name: frozenset({"torch"}))
    monkeypatch.setenv("GEMMPIPE_LOG_SELECTION", "1")
    caplog.set_level(logging.INFO)
    rows("a8w8_blockscale", "torch", {"method": "bfloat16_convert"}, {"M": 4, "N": N, "K": K})
    method, layer = blocks(engine, DEEPGEMM)
    start(engine)
    for _ in range(2):
        method.apply(layer, x_of(4))  # type: ignore[attr-defined]
    assert engine.calls == ["blocks"] * 2
    assert "the row's library is the engine's" in caplog.text
    assert "another form of the weight" not in caplog.text


@pytest.mark.parametrize("name", [DEEPGEMM, "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback"])
def test_a_quantised_x_that_no_row_answers_is_sglangs(engine: Sglang, name: str) -> None:
    kernel = block_kernel(block_linear(engine, name), N, K)
    assert kernel.quantise is not None
    _, layer = blocks(engine)
    for m in (1, 3):
        quantised, scale = kernel.quantise(x_of(m))
        out = kernel.call(quantised, layer.weight, scale, layer.weight_scale_inv, None)
        exact = linear(x_of(m).float(), layer.weight.float() * 0.01)
        assert (out.float() - exact).norm() < 0.05 * exact.norm()
    assert engine.calls == ["blocks"] * 2


@pytest.mark.parametrize(
    ("fields", "layer_fields", "reason"),
    [
        ({"weight_block_size": [32, 32]}, {}, "blocks of [32, 32]"),
        ({}, {"weight_scale_inv": torch.zeros(2, 1, dtype=torch.int32)}, "scales of the weight are int32 [2, 1]"),
        ({}, {"_block_fp8_bf16_weight": torch.zeros(1)}, "the weight is kept in bf16"),
    ],
)
def test_other_forms_of_weights_are_sglangs(engine: Sglang, rows, caplog, fields, layer_fields, reason) -> None:
    if layer_fields.get("_block_fp8_bf16_weight") is not None and engine.version == "0.5.20":
        pytest.skip("since 0.5.23")
    rows("a8w8_blockscale", "torch", {"method": "bfloat16_convert"}, {"M": 4, "N": N, "K": K})
    method, layer = blocks(engine)
    vars(method).update(fields, w8a8_block_fp8_linear=lambda **given: engine.calls.append("blocks"))
    vars(layer).update(layer_fields)
    caplog.set_level(logging.INFO)
    start(engine)
    method.apply(layer, x_of(4))  # type: ignore[attr-defined]
    assert engine.calls == ["blocks"]
    assert any(reason in text for text in caplog.messages)


def test_fp8_by_row(engine: Sglang, rows) -> None:
    rows("a8w8", "torch", {"method": "bfloat16_convert"}, {"M": 4, "N": N, "K": K, "q_dtype_w": "fp8"}, dtype="fp8")
    w = weight(N, K).float()
    scale = w.abs().amax(1, keepdim=True) / 448
    given = {"weight": (w / scale).to(torch.float8_e4m3fn).t(), "weight_scale": scale}
    start(engine)
    apply = engine.modules[f"{QUANTIZATION}.fp8_utils"].apply_fp8_linear  # type: ignore[attr-defined]
    for m in (4, 8):
        expected = linear(x_of(m).float(), given["weight"].t().float() * scale)
        out = apply(input=x_of(m), **given, use_per_token_if_dynamic=True)
        assert (out.float() - expected).norm() < 0.05 * expected.norm()
    assert engine.calls == ["rows"], "M 8 has no row"
    apply(input=x_of(4), **given, input_scale=torch.ones(1))
    apply(input=x_of(4), **given, compressed_tensor_quant=True)
    assert engine.calls == ["rows"] * 3, "one scale for the whole of x is SGLang's"


def config(**fields: object) -> SimpleNamespace:
    plain = {"num_experts": 4, "num_local_experts": 4, "activation": "silu", "is_gated": True, "inplace": False}
    plain |= {"apply_router_weight_on_input": False, "no_combine": False, "routed_scaling_factor": None}
    plain |= {"no_combine_keep_router_weight": False, "gemm1_alpha": None, "gemm1_clamp_limit": None}
    return SimpleNamespace(**{**plain, "swiglu_limit": None, "gate_up_interleaved": True, **fields})


def routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor, None]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(tokens)]).int()
    return torch.rand(tokens, 2, generator=generator), ids, None


class TopK(SimpleNamespace):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter((self.topk_weights, self.topk_ids, None))


def topk(tokens: int) -> TopK:
    weights, ids, _ = routed(tokens)
    return TopK(topk_weights=weights, topk_ids=ids)


KEY = {"model_dim": 64, "inter_dim": 32, "expert": 4, "topk": 2}


def test_experts(engine: Sglang, rows) -> None:
    rows("fmoe", "torch", {"method": "expert_loop"}, {"token": 4, **KEY}, dtype="bfloat16")
    start(engine)
    fused = engine.modules[FUSED_MOE].fused_experts  # type: ignore[attr-defined]
    plain = sglang_stand_in.Sglang(version=engine.version)
    sglang_stand_in._experts(plain)
    own = plain.modules[FUSED_MOE].fused_experts  # type: ignore[attr-defined]
    w1, w2 = weight(4, 64, 64), weight(4, 64, 32)
    for tokens in (4, 5):
        for factor in (None, 2.5):
            given = (x_of(tokens, 64), w1, w2, topk(tokens), config(routed_scaling_factor=factor))
            out, expected = fused(*given).float(), own(*given).float()
            assert (out - expected).norm() < 0.02 * expected.norm()
    assert engine.calls == ["experts"] * 2, "5 tokens have no row"
    x = x_of(4, 64)
    kept = x.clone()
    fused(x, w1, w2, topk(4), config(inplace=True))
    assert torch.equal(x, kept), "a row's result is new memory"
    before = len(engine.calls)
    fused(x_of(4, 64), w1, w2, topk(4), config(num_local_experts=2))
    fused(x_of(4, 64), w1, w2, topk(4), config(), b1=torch.zeros(4, 64))
    assert len(engine.calls) == before + 2, "experts of other devices and biases are SGLang's"


def test_padding_without_experts_is_sglangs(engine: Sglang, rows, caplog) -> None:
    rows("fmoe", "torch", {"method": "expert_loop"}, {"token": 4, **KEY}, dtype="bfloat16")
    engine.pads = True
    caplog.set_level(logging.INFO)
    start(engine)
    fused = engine.modules[FUSED_MOE].fused_experts  # type: ignore[attr-defined]
    fused(x_of(4, 64), weight(4, 64, 64), weight(4, 64, 32), topk(4), config())
    assert engine.calls == ["experts"]
    assert any("padding tokens have no experts" in text for text in caplog.messages)


def test_the_scope(engine: Sglang, rows, monkeypatch, caplog) -> None:
    rows("a16w16", "torch", {"method": "float32_convert"}, {"M": 1, "N": N, "K": K})
    monkeypatch.setenv("GEMMPIPE_SGLANG", "moe")
    caplog.set_level(logging.INFO)
    method, layer = unquantised(engine)
    start(engine)
    method.apply(layer, x_of(1))  # type: ignore[attr-defined]
    assert engine.calls == ["linear"]
    targets = set(engine.registry._hooks)
    assert targets == {hook.target for hook in HOOKS if hook.kind == "moe"}


@pytest.mark.parametrize(("scope", "shortened"), [("", False), ("replays", True), ("linear,moe,replays", True)])
def test_replays_of_graphs(engine: Sglang, monkeypatch, caplog, scope: str, shortened: bool) -> None:
    original = torch.cuda.CUDAGraph.replay
    monkeypatch.setenv("GEMMPIPE_SGLANG", scope)
    caplog.set_level(logging.INFO)
    try:
        start(engine)
        assert (torch.cuda.CUDAGraph.replay is not original) == shortened
        assert not any("does nothing" in text for text in caplog.messages)
    finally:
        restore_replays()


@pytest.mark.parametrize("value", ["off", "liner"])
def test_off_and_unknown_words_change_nothing(engine: Sglang, monkeypatch, caplog, value: str) -> None:
    monkeypatch.setenv("GEMMPIPE_SGLANG", value)
    caplog.set_level(logging.INFO)
    start(engine)
    assert not any(engine.registry._hooks.values())
    (line,) = [text for text in caplog.messages if text.startswith("gemmpipe ")]
    assert "does nothing" in line


def test_other_processes_get_no_hooks(engine: Sglang, monkeypatch) -> None:
    monkeypatch.setattr("multiprocessing.parent_process", lambda: None)
    start(engine)
    assert not any(engine.registry._hooks.values())


def test_another_version_is_left_alone(engine: Sglang, monkeypatch, caplog) -> None:
    monkeypatch.setattr("gemmpipe.plugins.sglang.metadata.version", lambda name: "0.6.0")
    caplog.set_level(logging.INFO)
    start(engine)
    assert not any(engine.registry._hooks.values())
    assert "version 0.6.0 is not supported, expected 0.5.20 to 0.5.23" in caplog.text


def test_a_changed_function_is_left_alone(engine: Sglang, rows, caplog) -> None:
    rows("a16w16", "torch", {"method": "float32_convert"}, {"M": 1, "N": N, "K": K})
    module = engine.modules[f"{QUANTIZATION}.fp8_utils"]
    module.apply_fp8_linear = lambda x, weight: x  # type: ignore[attr-defined]
    del engine.modules[f"{QUANTIZATION}.fp8"].Fp8LinearMethod  # type: ignore[attr-defined]
    caplog.set_level(logging.INFO)
    start(engine)
    method, layer = unquantised(engine)
    method.apply(layer, x_of(1))  # type: ignore[attr-defined]
    assert engine.calls == []
    assert "apply_fp8_linear has the parameters x, weight" in SGLANG_NOTICE.reasons["linear fp8 by row"]
    assert "AttributeError" in SGLANG_NOTICE.reasons["linear fp8 by blocks"]


@pytest.mark.parametrize(
    ("path", "value", "product", "reason"),
    [
        ("deterministic.enable_deterministic_inference", True, "linear bf16", "deterministic inference"),
        ("kernel.fp8_gemm_runner_backend", "deep_gemm", "linear fp8 by blocks", "--fp8-gemm-backend deep_gemm"),
        ("graph.cuda_graph_config.prefill.backend", "full", "experts", "full prefill graphs"),
    ],
)
def test_settings_of_the_server(engine: Sglang, rows, path: str, value: object, product: str, reason: str) -> None:
    rows("a16w16", "torch", {"method": "float32_convert"}, {"M": 1, "N": N, "K": K})
    *parents, last = path.split(".")
    found: object = engine.settings
    for name in parents:
        found = getattr(found, name)
    setattr(found, last, value)
    start(engine)
    method, layer = unquantised(engine)
    method.apply(layer, x_of(1))  # type: ignore[attr-defined]
    assert reason in SGLANG_NOTICE.reasons[product]


def test_a_failing_set_up_is_one_warning(engine: Sglang, monkeypatch, caplog) -> None:
    del engine.modules["sglang.srt.plugins.hook_registry"].HookRegistry  # type: ignore[attr-defined]
    register()
    (record,) = [each for each in caplog.records if each.name == "gemmpipe.sglang"]
    assert record.levelno == logging.WARNING
    assert "set-up failed: AttributeError" in record.message


@pytest.mark.parametrize("version", VERSIONS)
def test_the_contract_with_sglangs_sources(version: str) -> None:
    """The targets exist with their parameters, and what the hooks read of SGLang is there."""
    for hook in HOOKS:
        path, _, name = hook.target.removeprefix("sglang.").rpartition(".")
        owner = ""
        if path.rpartition(".")[2][0].isupper():
            path, _, owner = path.rpartition(".")
        text = source_of("sglang", version, f"sglang/{path.replace('.', '/')}.py")
        found = definition(text, owner) if owner else None
        nodes = found.body if found is not None else None  # type: ignore[attr-defined]
        node = next(n for n in nodes if getattr(n, "name", "") == name) if nodes else definition(text, name)
        names = tuple(argument.arg for argument in node.args.args)  # type: ignore[attr-defined]
        assert names[: len(hook.parameters)] == hook.parameters, hook.target
    utils = source_of("sglang", version, "sglang/srt/layers/quantization/fp8_utils.py")
    for name in ("per_token_group_quant_fp8", "sglang_per_token_quant_fp8"):
        assert name in utils
    fields = source_of("sglang", version, "sglang/srt/arg_groups/fields/exec_.py")
    for name in ("enable_deterministic_inference", "fp8_gemm_runner_backend"):
        assert f"    {name}: A[" in fields
    info = source_of("sglang", version, "sglang/srt/model_executor/forward_batch_info.py")
    assert "def enable_num_token_non_padded():" in info
    scheduler = source_of("sglang", version, "sglang/srt/managers/scheduler.py")
    assert "load_plugins()" in scheduler
    config_text = source_of("sglang", version, "sglang/srt/layers/moe/moe_runner/base.py")
    for name in ("num_experts", "num_local_experts", "routed_scaling_factor", "is_gated", "swiglu_limit"):
        assert f"    {name}: " in config_text


@pytest.mark.compile
def test_a_compiled_layer_dispatches_each_m(engine: Sglang, rows) -> None:
    rows("a16w16", "torch", {"method": "float32_convert"}, {"M": 4, "N": N, "K": K})
    method, layer = unquantised(engine)
    start(engine)

    @torch.compile(dynamic=True, backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        return method.apply(layer, x * 2) + 1  # type: ignore[attr-defined,no-any-return]

    unknown = step(x_of(4))
    assert engine.calls == ["linear"], "a layer that was not called before is SGLang's"
    torch._dynamo.reset()
    method.apply(layer, x_of(4))  # type: ignore[attr-defined]
    for m in (4, 5000, 6000):
        expected = linear((x_of(m) * 2).float(), layer.weight.float()) + 1
        torch.testing.assert_close(step(x_of(m)).float(), expected, atol=0.05, rtol=0.02)
    torch.testing.assert_close(unknown.float(), step(x_of(4)).float(), atol=0.05, rtol=0.02)
    assert engine.calls.count("linear") == 3, "5000 and 6000 rows are SGLang's"


def test_weights_that_tuned_kernels_do_not_read() -> None:
    plain = {"block_quant": True, "weight_block_size": [128, 128]}
    w = torch.zeros(256, 384).to(torch.float8_e4m3fn)
    scale = torch.ones(2, 3)

    def reason(fields: dict[str, object], **layer: object) -> str:
        given = {"weight": w, "weight_scale_inv": scale, **layer}
        return block_layer_reason(SimpleNamespace(**{**plain, **fields}), SimpleNamespace(**given))

    assert reason({}) == ""
    assert reason({"use_mxfp8": True}) == "mxfp8"
    assert reason({"weight_block_size": [32, 32]}) == "blocks of [32, 32]"
    assert "not [N, K] in fp8" in reason({}, weight=w.t())
    assert "expected float32 [2, 3]" in reason({}, weight_scale_inv=scale.int())
    assert "not contiguous" in reason({}, weight_scale_inv=torch.ones(3, 2).t())
    assert "MXFP8" in reason({"block_fp8_as_mxfp8": True}, block_fp8_mxfp8_ready=True)


@pytest.mark.parametrize(
    ("fields", "more", "reason"),
    [
        ({}, {}, ""),
        ({}, {"use_fp8_w8a8": False, "b1": None}, ""),
        ({}, {"b1": torch.zeros(1)}, "b1"),
        ({}, {"block_size": 4}, "block_size, which is not known here"),
        ({"num_local_experts": 2}, {}, "experts are spread over devices"),
        ({"num_experts": None}, {}, "experts are spread over devices"),
        ({"activation": "gelu"}, {}, "activation gelu"),
        ({"swiglu_limit": 7.0}, {}, "swiglu_limit"),
        ({}, {"use_fp8_w8a8": True}, "one scale per expert"),
        ({}, {"use_fp8_w8a8": True, "block_shape": [64, 64]}, "blocks of [64, 64]"),
        ({}, {"use_fp8_w8a8": True, "block_shape": [128, 128]}, ""),
        ({}, {"use_fp8_w8a8": True, "per_channel_quant": True}, ""),
    ],
)
def test_experts_that_tuned_kernels_do_not_compute(fields, more, reason: str) -> None:
    x, w1, w2 = x_of(4, 64), weight(4, 64, 64), weight(4, 64, 32)
    assert experts_reason(x, w1, w2, config(**fields), more) == reason


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.5.19", False), ("0.5.20", True), ("0.5.23", True), ("0.5.23.post1", True), ("0.5.24", False), ("dev", False)],
)
def test_versions(version: str, supported: bool) -> None:
    assert (unsupported_sglang(version) == "") == supported
