"""Dispatch per M with an engine's kernel: rows answer, all else is the engine's; the work per call is constant."""

import gc
import json
from types import SimpleNamespace

import pytest
import torch
from executed_lines import steps
from torch.nn.functional import linear

from gemmpipe.core.data import Candidate
from gemmpipe.family import load_family
from gemmpipe.family.reference import dequantise, dequantise_weight
from gemmpipe.plugins import engine_dispatch as module
from gemmpipe.plugins.engine_dispatch import EngineKernel, engine_dispatch, register_kernel
from gemmpipe.plugins.operators import register_plugin_operators
from gemmpipe.runtime import dispatch_report
from gemmpipe.runtime.select import LookupResult, RunnableCandidate
from gemmpipe.runtime.selection_log import LOG

N, K = 64, 256
BF16 = torch.bfloat16


def plain(x, w, x_scale, w_scale, bias):
    return linear(x, w, bias)


def x_of(m: int) -> torch.Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).bfloat16()


@pytest.fixture
def w() -> torch.Tensor:
    return (torch.randn(N, K, generator=torch.Generator().manual_seed(5)) * K**-0.5).bfloat16()


def test_rows_answer_and_all_else_is_the_engines(rows, counted, w) -> None:
    rows("a16w16", "torch", {"method": "float32_convert"}, *({"M": m, "N": N, "K": K} for m in (1, 16)))
    engine = counted(plain)
    dispatch = engine_dispatch("a16w16", register_kernel(EngineKernel(name="test", call=engine)))
    for m in (1, 16, 9, 9):  # 9 is padded to 16
        assert torch.equal(dispatch(x_of(m), w, None, None, None, BF16), linear(x_of(m).float(), w.float()).to(BF16))
    assert engine.calls == 0
    for _ in range(2):
        assert torch.equal(dispatch(x_of(40), w, None, None, None, BF16), linear(x_of(40), w))
    assert engine.calls == 2
    assert sorted(dispatch_report().values()) == ["engine", "exact", "exact", "padded"]
    assert not LOG.untuned


def test_a_row_of_the_engines_own_library_is_left_to_the_engine(rows, counted, w) -> None:
    """The library was the fastest: the engine runs it as it does without the plug-in."""
    rows("a16w16", "torch", {"method": "mm"}, {"M": 4, "N": N, "K": K})
    engine = counted(plain)
    kernel = EngineKernel(name="test", call=engine, libtypes=frozenset({"torch"}))
    dispatch = engine_dispatch("a16w16", register_kernel(kernel))
    for _ in range(2):
        assert torch.equal(dispatch(x_of(4), w, None, None, None, BF16), linear(x_of(4), w))
    assert engine.calls == 2
    assert list(dispatch_report().values()) == ["engine"]


@pytest.mark.parametrize(("baseline_us", "engines"), [(1.01, True), (1.03, False), (None, False)])
def test_a_row_hardly_ahead_of_the_engines_own_product_is_left_to_it(rows, counted, w, baseline_us, engines) -> None:
    """The engine's kernel is the baseline of these rows; in a model a lead of 1 % is none."""
    rows("a16w16", "torch", {"method": "float32_convert"}, {"M": 4, "N": N, "K": K}, us=1.0, baseline_us=baseline_us)
    engine = counted(plain)
    dispatch = engine_dispatch("a16w16", register_kernel(EngineKernel(name="test", call=engine, is_baseline=True)))
    dispatch(x_of(4), w, None, None, None, BF16)
    assert engine.calls == engines
    assert list(dispatch_report().values()) == ["engine" if engines else "exact"]


@pytest.mark.parametrize(
    ("ratios", "engines"), [({"deepgemm": 1.01}, True), ({"deepgemm": 1.03}, False), ({"x": 1.0}, False)]
)
def test_a_row_hardly_ahead_of_the_engines_library_is_left_to_it(rows, counted, w, ratios, engines) -> None:
    """The row was timed beside that library, which was not the baseline."""
    key, text = {"M": 4, "N": N, "K": K}, json.dumps(ratios)
    rows("a16w16", "torch", {"method": "float32_convert"}, key, us=1.0, backend_ratios=text)
    engine = counted(plain)
    kernel = EngineKernel(name="test", call=engine, libtypes=frozenset({"deepgemm"}))
    dispatch = engine_dispatch("a16w16", register_kernel(kernel))
    dispatch(x_of(4), w, None, None, None, BF16)
    assert engine.calls == engines


def test_16_bit_activations_stay_so_for_a_row_of_the_engines_library(rows, counted) -> None:
    rows("a8w8_blockscale", "torch", {"method": "bfloat16_convert"}, {"M": 4, "N": 2 * N, "K": K})
    _, _, weights = fp8_operands(4)
    engine = counted(lambda x, w, xs, ws, bias: x.new_zeros(x.shape[0], w.shape[0]))
    quantise = counted(lambda x: (x.to(torch.float8_e4m3fn), torch.ones(x.shape[0], K // 128)))
    kernel = EngineKernel(name="16bit", call=plain, from_16bit=engine, quantise=quantise, libtypes=frozenset({"torch"}))
    dispatch = engine_dispatch("a8w8_blockscale", register_kernel(kernel))
    for _ in range(2):
        dispatch.product_16bit(x_of(4), weights.w, weights.w_scale, BF16)
    assert engine.calls == 2
    assert quantise.calls == 1  # for the look-up


def test_no_product_of_the_family_is_the_engines(rows, counted, w) -> None:
    rows("a16w16", "torch", {"method": "mm"}, {"M": 1, "N": N, "K": K})
    engine = counted(plain)
    dispatch = engine_dispatch("a16w16", register_kernel(EngineKernel(name="test", call=engine)))
    x, wide = x_of(2).double(), w.double()
    for _ in range(2):
        assert torch.equal(dispatch(x, wide, None, None, None, torch.float64), linear(x, wide))
    assert engine.calls == 2


def test_a_candidate_that_fails_or_keeps_a_form_is_skipped(rows, counted, w, caplog) -> None:
    rows("a16w16", "torch", {"method": "float32_copy"}, {"M": 4, "N": N, "K": K})
    engine = counted(plain)
    dispatch = engine_dispatch("a16w16", register_kernel(EngineKernel(name="test", call=engine)))
    dispatch(x_of(4), w, None, None, None, BF16)
    assert engine.calls == 1
    assert "keeps another form of the weight" in caplog.text
    rows("a16w16", "torch", {"method": "float32_convert"}, {"M": 4, "N": N, "K": K})
    dispatch = engine_dispatch("a16w16", register_kernel(EngineKernel(name="test", call=engine)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gemmpipe.family.reference.dequantise", None)
        patch.setattr("gemmpipe.backends.aten.Torch.bind", lambda *_: 1 / 0)
        out = dispatch(x_of(4), w, None, None, None, BF16)
    assert torch.equal(out, linear(x_of(4), w))
    assert "ZeroDivisionError" in caplog.text
    assert engine.calls == 2


def test_in_a_graph_capture_only_known_keys_are_tuned(rows, counted, w, monkeypatch) -> None:
    rows("a16w16", "torch", {"method": "float32_convert"}, {"M": 1, "N": N, "K": K}, {"M": 2, "N": N, "K": K})
    engine = counted(plain)
    dispatch = engine_dispatch("a16w16", register_kernel(EngineKernel(name="test", call=engine)))
    dispatch(x_of(1), w, None, None, None, BF16)
    monkeypatch.setattr(module, "is_capturing", lambda device: True)
    dispatch(x_of(1), w, None, None, None, BF16)
    assert engine.calls == 0
    dispatch(x_of(2), w, None, None, None, BF16)
    assert engine.calls == 1
    monkeypatch.undo()
    dispatch(x_of(2), w, None, None, None, BF16)
    assert engine.calls == 1  # looked up at its next call outside of a capture


def fp8_operands(m: int):
    family = load_family("a8w8_blockscale")
    from gemmpipe.family import KernelDefaults
    from gemmpipe.family.problem import make_problem

    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": m, "N": N * 2, "K": K}, defaults, "sm_90", "test"))
    generator = torch.Generator().manual_seed(m)
    return spec, family.make_inputs(spec, generator), family.make_weights(spec, generator)


def test_16_bit_activations_are_quantised_for_rows_alone(rows, counted) -> None:
    key = {"M": 4, "N": 2 * N, "K": K}
    rows("a8w8_blockscale", "torch", {"method": "bfloat16_convert"}, key)
    spec, _, weights = fp8_operands(4)
    wide = dequantise_weight(spec, weights, torch.float32)

    def quantise(x):
        groups = x.float().view(*x.shape[:-1], -1, 128)
        scale = groups.abs().amax(-1, keepdim=True) / 448
        return (groups / scale).to(torch.float8_e4m3fn).view(x.shape), scale[..., 0].contiguous()

    quantising, engine = counted(quantise), counted(lambda x, w, xs, ws, bias: linear(x.float(), wide).to(BF16))
    kernel = EngineKernel(name="test", call=plain, from_16bit=engine, quantise=quantising)
    dispatch = engine_dispatch("a8w8_blockscale", register_kernel(kernel))
    for m, times in ((4, 2), (8, 2)):
        for _ in range(times):
            out = dispatch.product_16bit(x_of(m), weights.w, weights.w_scale, BF16)
            expected = linear(x_of(m).float(), wide)
            assert (out.float() - expected).norm() < 0.05 * expected.norm()  # fp8 rounds by up to 6 %
    assert engine.calls == 2  # M 8 has no row
    assert quantising.calls == 4  # 1 and 1 for the look-ups, 2 for the calls of M 4
    assert dispatch.product_16bit(x_of(4)[:0], weights.w, weights.w_scale, BF16).shape == (0, 2 * N)


def test_fp8_by_blocks_in_both_orders_of_scales(rows, counted) -> None:
    rows("a8w8_blockscale", "torch", {"method": "bfloat16_convert"}, {"M": 4, "N": 2 * N, "K": K})
    spec, inputs, weights = fp8_operands(4)
    expected = dequantise(inputs.x, inputs.x_scale, spec.x_scale, torch.float32) @ (
        dequantise_weight(spec, weights, torch.float32).t()
    )
    engine = counted(plain)
    dispatch = engine_dispatch("a8w8_blockscale", register_kernel(EngineKernel(name="test", call=engine)))
    for scale in (inputs.x_scale, inputs.x_scale.t().contiguous().t()):
        out = dispatch(inputs.x, weights.w, scale, weights.w_scale, None, BF16)
        assert (out.float() - expected).norm() < 0.01 * expected.norm()
    assert engine.calls == 0


@pytest.mark.parametrize("answered", [True, False])
def test_the_work_of_a_call_stays_constant(rows, counted, w, answered: bool) -> None:
    rows("a16w16", "torch", {"method": "mm"}, {"M": 4 if answered else 5000, "N": N, "K": K})
    kernel = register_kernel(EngineKernel(name="test", call=plain))
    register_plugin_operators()
    x = x_of(4)

    def call() -> None:
        torch.ops.gemmpipe.engine_product("a16w16", x, w, None, None, None, BF16, kernel)

    for _ in range(10):
        call()
    dispatch = engine_dispatch("a16w16", kernel)
    held = (dispatch.calls, dispatch.answered, LOG.steps, LOG.untuned, LOG._seen, LOG._logged, LOG._warned)
    before, sizes = steps(call), [len(each) for each in held]
    gc.collect()
    objects = len(gc.get_objects())
    for _ in range(10_000):
        call()
    gc.collect()
    assert len(gc.get_objects()) - objects < 50
    assert [len(each) for each in held] == sizes
    assert steps(call) == before


def test_the_memory_order_of_scales_is_determined_once_for_their_strides(rows, counted, monkeypatch) -> None:
    """Either memory order and other rows have their own call."""
    rows("a8w8_blockscale", "torch", {"method": "bfloat16_convert"}, {"M": 4, "N": 2 * N, "K": K, "x_scale": "column"})
    _, inputs, weights = fp8_operands(4)
    more = fp8_operands(8)[1]
    engine = counted(lambda x, w, xs, ws, bias: torch.full((x.shape[0], w.shape[0]), 7.0, dtype=BF16))
    dispatch = engine_dispatch("a8w8_blockscale", register_kernel(EngineKernel(name="test", call=engine)))
    column = inputs.x_scale.t().contiguous().t()
    for turn in range(3):
        if turn == 2:  # the first call is bound, the second found by its order
            monkeypatch.setattr("gemmpipe.runtime.dispatch.memory_orders", None)
        assert dispatch(inputs.x, weights.w, column, weights.w_scale, None, BF16)[0, 0] != 7
        assert engine.calls == 2 * turn
        for x, scale in ((inputs.x, inputs.x_scale.contiguous()), (more.x, more.x_scale)):
            assert dispatch(x, weights.w, scale, weights.w_scale, None, BF16)[0, 0] == 7
    monkeypatch.undo()
    module.clear_dispatches()
    assert not engine_dispatch("a8w8_blockscale", "test").calls


def test_scales_of_one_stride_and_another_shape_are_another_key(rows, counted) -> None:
    """[4, 1] and [1, 1] have strides (1, 1): a call for rows' scales would read beyond the one scale."""
    rows("a8w8", "torch", {"method": "bfloat16_convert"}, {"M": 4, "N": N, "K": K})
    engine = counted(lambda x, w, xs, ws, bias: torch.zeros((x.shape[0], w.shape[0]), dtype=BF16))
    dispatch = engine_dispatch("a8w8", register_kernel(EngineKernel(name="test", call=engine)))
    x, w = (torch.ones(rows, K).to(torch.float8_e4m3fn) for rows in (4, N))
    by_row, single = torch.ones(4, 1), torch.ones(4, 1)[:1]
    assert by_row.stride() == single.stride()
    for _ in range(2):
        dispatch(x, w, by_row, torch.ones(N, 1), None, BF16)
    before = engine.calls
    dispatch(x, w, single, torch.ones(N, 1), None, BF16)
    assert engine.calls == before + 1, "no product of the family, so it is the engine's"


def test_keys_are_bounded(rows, w, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_KEYS", 8)
    rows("a16w16", "torch", {"method": "mm"}, {"M": 4, "N": N, "K": K})
    dispatch = engine_dispatch("a16w16", register_kernel(EngineKernel(name="test", call=plain)))
    for m in range(1, 40):
        dispatch(x_of(m), w, None, None, None, BF16)
        assert len(dispatch.calls) <= 8


@pytest.mark.compile
def test_the_operators_keep_torchs_rules(rows, w) -> None:
    rows("a16w16", "torch", {"method": "mm"}, {"M": 4, "N": N, "K": K})
    kernel = register_kernel(EngineKernel(name="test", call=plain))
    register_plugin_operators()
    for m in (4, 5000):
        torch.library.opcheck(
            torch.ops.gemmpipe.engine_product.default, ("a16w16", x_of(m), w, None, None, None, BF16, kernel)
        )
    from_16bit = EngineKernel(name="16bit", call=plain, from_16bit=plain, quantise=lambda x: (x, x))
    operands = ("a8w8_blockscale", x_of(4), w, None, BF16, register_kernel(from_16bit))  # opcheck has no fp8
    torch.library.opcheck(torch.ops.gemmpipe.engine_product_16bit.default, operands)


@pytest.mark.compile
def test_a_compiled_graph_dispatches_each_m(rows, counted, w) -> None:
    rows("a16w16", "torch", {"method": "float32_convert"}, {"M": 4, "N": N, "K": K})
    engine = counted(plain)
    kernel = register_kernel(EngineKernel(name="test", call=engine))
    register_plugin_operators()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.gemmpipe.engine_product("a16w16", x * 2, w, None, None, None, BF16, kernel) + 1

    for m in (4, 5000, 6000):
        layer(x_of(m))
    assert engine.calls == 2
    assert "exact" in dispatch_report().values()


@pytest.mark.parametrize("after_quantiser", [False, True])
def test_only_after_our_quantiser_a_rows_launch_overlaps_the_one_before(monkeypatch, after_quantiser: bool) -> None:
    family = load_family("a8w8_blockscale")
    (own,) = (each for each in family.implementations if each.label == "sliced")
    row = LookupResult(
        step="exact",
        source="test",
        runnable=RunnableCandidate(implementation=own, candidate=Candidate.of("sliced", {})),
    )
    monkeypatch.setattr(module, "lookup_results", lambda *_: iter([row]))
    bound: list[LookupResult] = []
    request = SimpleNamespace(
        problem=SimpleNamespace(id="test"),
        spec=None,
        device=None,
        orders=(),
        bind=lambda selected: bound.append(selected) or plain,
        run=lambda call: torch.zeros(1),
    )
    cache = SimpleNamespace(tables=dict, family=family)
    kernel = EngineKernel(name="engine", call=plain, after_quantiser=after_quantiser)
    assert module.tuned_call(cache, request, kernel) is not None
    assert [each.runnable.implementation.launch_pdl for each in bound] == [after_quantiser]
    assert not own.launch_pdl
