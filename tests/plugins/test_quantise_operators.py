"""The quantisers' operators without a GPU: what is left to vLLM's operators, and how they come into its passes.

Their kernels are tested in tests/templates/test_fused_quantise.py, real passes of vLLM in test_vllm_contract.py.
"""

import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._subclasses.fake_tensor import FakeTensorMode

from gemmpipe.core.data import Device
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.plugins import quantise_operators as operators
from gemmpipe.plugins import vllm_notice, vllm_quantise
from gemmpipe.plugins.scope import QUANTISE, Scope

FP8 = torch.float8_e4m3fn
KEY = "kFp8Dynamic128Sym"
OTHER = "another scheme"
Calls = list[tuple[Any, ...]]


def engine_norm(
    result: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    epsilon: float,
    scale_ub: Any,
    residual: torch.Tensor | None,
    group_size: int,
    is_scale_transposed: bool,
) -> None:
    """As vLLM's operator: the residual becomes the sum."""
    if residual is not None:
        residual.add_(x)
    scale.fill_(epsilon)


@pytest.fixture
def calls() -> Iterator[Calls]:
    """The calls of vLLM's operators."""
    made: Calls = []

    def norm(*given: Any) -> None:
        made.append((operators.NORM, *given))
        engine_norm(*given)

    before = dict(operators._ENGINE), list(operators._ANNOUNCE)
    operators.register_quantise_operators({operators.NORM: norm, operators.SILU: lambda *given: made.append(given)})
    yield made
    operators._ENGINE.clear()
    operators._ENGINE.update(before[0])
    operators._ANNOUNCE[:] = before[1]


def norm_operands(m: int = 3, k: int = 256) -> list[torch.Tensor]:
    """result, x, weight, scale."""
    return [
        torch.zeros(m, k, dtype=FP8),
        torch.ones(m, k).bfloat16(),
        torch.ones(k).bfloat16(),
        torch.zeros(m, k // 128),
    ]


def test_tensors_of_a_cpu_are_left_to_the_engine_with_all_arguments(calls: Calls) -> None:
    given = norm_operands()
    residual = torch.ones(3, 256).bfloat16()
    torch.ops.gemmpipe.rms_norm_per_block_quant(*given, 1e-6, None, residual, 128, True)
    ((name, *found),) = calls
    assert name == operators.NORM
    assert all(a is b for a, b in zip(found[:4], given, strict=True))
    assert (found[4], found[5], found[7], found[8]) == (1e-6, None, 128, True)
    assert torch.equal(residual, torch.full((3, 256), 2.0).bfloat16())


def test_the_norm_with_a_sum_apart_leaves_the_residual_as_it_is(calls: Calls) -> None:
    residual, total = torch.ones(3, 256).bfloat16(), torch.full((3, 256), float("nan")).bfloat16()
    torch.ops.gemmpipe.rms_norm_per_block_quant_out(*norm_operands(), 1e-6, None, residual, total, 128, False)
    assert torch.equal(residual, torch.ones(3, 256).bfloat16())
    assert torch.equal(total, torch.full((3, 256), 2.0).bfloat16())
    assert len(calls) == 1


def test_silu_has_the_defaults_of_vllms_operator(calls: Calls) -> None:
    x, out, scale = torch.zeros(3, 256).bfloat16(), torch.zeros(3, 128, dtype=FP8), torch.zeros(3, 1)
    torch.ops.gemmpipe.silu_and_mul_per_block_quant(out, x, scale, 128)
    torch.ops.gemmpipe.silu_and_mul_per_block_quant(out, x, scale, 128, is_scale_transposed=True)
    assert [found[3:] for found in calls] == [(128, None, False), (128, None, True)]


def test_operators_are_what_their_schemas_say(calls: Calls) -> None:
    """torch's own checks: what is written is declared, and shapes are known without values."""
    residual = torch.ones(3, 256).bfloat16()
    given = (*norm_operands(), 1e-6, None, residual, 128, True)
    torch.library.opcheck(torch.ops.gemmpipe.rms_norm_per_block_quant.default, given, test_utils="test_faketensor")
    given = (*norm_operands(), 1e-6, None, residual, residual.clone(), 128, True)
    torch.library.opcheck(torch.ops.gemmpipe.rms_norm_per_block_quant_out.default, given, test_utils="test_faketensor")


def laid(shape: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.mark.parametrize(
    ("scale", "transposed", "strides"),
    [
        (laid((5, 3), (3, 1)), False, (3, 1)),
        (laid((5, 3), (1, 5)), True, (1, 5)),
        (laid((5, 3), (1, 8)), True, (1, 8)),
        (laid((1, 3), (1, 4)), True, (1, 4)),
        (laid((1, 3), (3, 1)), True, (1, 1)),
        (laid((5, 3), (1, 5)), False, None),
        (laid((5, 3), (4, 1)), False, None),
        (laid((5, 3), (3, 1)), True, None),
        (laid((5, 4), (3, 1)), False, None),
        (laid((3, 5), (5, 1)), False, None),
        (laid((5, 3), (3, 1), torch.bfloat16), False, None),
    ],
)
def test_scales_are_written_where_vllms_operators_write(
    scale: torch.Tensor, transposed: bool, strides: tuple[int, int] | None
) -> None:
    assert operators.scale_strides(scale, scale.shape[0] if scale.shape[1] == 3 else 5, 3, transposed) == strides


def device_of(gfx: str) -> Device:
    kind = "hip" if gfx.startswith("gfx") else "cuda"
    return replace(arch_device("sm_90"), gfx=gfx, kind=kind)


@pytest.mark.parametrize("gfx", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
def test_devices_with_kernels(gfx: str) -> None:
    assert operators.has_kernels(device_of(gfx)) == (gfx in ("sm_89", "sm_90", "sm_100"))
    assert not operators.has_kernels(cpu_device())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> types.SimpleNamespace:
    """A vLLM with its passes' tables and operators, of which only names and schemas matter."""
    library = torch.library.Library("_C", "FRAGMENT")
    for name in (operators.NORM, operators.SILU, operators.GROUPS):
        library.define(name + operators.SCHEMAS[name])
    own = {name: getattr(torch.ops._C, name).default for name in (operators.NORM, operators.SILU)}
    keys = [types.SimpleNamespace(quant=quant, fused_add=added) for quant in (KEY, OTHER) for added in (False, True)]

    class Fusion:
        pass_config = types.SimpleNamespace(fuse_norm_quant=True)

        def __call__(self, graph: Any) -> None:
            graph.fused = True

    class Fix:
        def __call__(self, graph: Any) -> None:
            pass

    norms = {id(key): own[operators.NORM] for key in keys}
    table = KeyedBy(keys, norms)
    found = types.SimpleNamespace(
        norms=table, activations=dict.fromkeys((KEY, OTHER), own[operators.SILU]), own=own, fusion=Fusion, fix=Fix
    )
    passes = "vllm.compilation.passes"
    modules: dict[str, dict[str, Any]] = {
        f"{passes}.fusion.rms_quant_fusion": {"FUSED_OPS": found.norms, "RMSNormQuantFusionPass": Fusion},
        f"{passes}.fusion.act_quant_fusion": {"FUSED_OPS": found.activations},
        f"{passes}.utility.fix_functionalization": {"FixFunctionalizationPass": Fix},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {KEY: KEY},
    }
    for name, members in modules.items():
        made = types.ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)
    found.library = library
    yield found
    library._destroy()


class KeyedBy:
    """A table by keys that compare by identity, with what the plug-in uses of a dict."""

    def __init__(self, keys: list[Any], values: dict[int, Any]) -> None:
        self.keys, self.values = keys, values

    def items(self) -> list[tuple[Any, Any]]:
        return [(key, self.values[id(key)]) for key in self.keys]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.values[id(key)] = value


def test_the_entries_for_scales_of_128_become_ours(engine: types.SimpleNamespace) -> None:
    ours = torch.ops.gemmpipe
    for _ in range(2):  # a second time nothing changes
        vllm_quantise.install()
        found = {(key.quant, key.fused_add): each for key, each in engine.norms.items()}
        for added in (False, True):
            assert found[KEY, added] is ours.rms_norm_per_block_quant.default
            assert found[OTHER, added] is engine.own[operators.NORM]
        assert engine.activations[KEY] is ours.silu_and_mul_per_block_quant.default
        assert engine.activations[OTHER] is engine.own[operators.SILU]
    assert operators._ENGINE[operators.NORM] is engine.own[operators.NORM]


def test_quantisers_alone_become_ours_before_vllms_last_pass(engine: types.SimpleNamespace) -> None:
    vllm_quantise.install()
    theirs, ours = torch.ops._C.per_token_group_fp8_quant.default, torch.ops.gemmpipe.per_token_group_fp8_quant.default
    for on in (False, True):
        graph = torch.fx.Graph()
        nodes = [
            graph.call_function(auto_functionalized, (theirs,), {"group_size": size, "eps": 1e-10})
            for size in (128, 64)
        ]
        last = engine.fix()
        last.pass_config = types.SimpleNamespace(fuse_norm_quant=False, fuse_act_quant=on)
        last(graph)
        assert [node.args[0] for node in nodes] == [ours if on else theirs, theirs]
        assert nodes[0].kwargs == {"group_size": 128, "eps": 1e-10}


def test_a_kernel_that_quantises_itself_calls_our_quantiser(
    engine: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Calls = []

    def per_token_group_quant_fp8(x: torch.Tensor, group_size: int, *rest: Any, **named: Any) -> tuple[str, str]:
        made.append((group_size, *rest, named))
        return "vLLM's", "scales"

    module = types.ModuleType(vllm_quantise._CALLER)
    module.per_token_group_quant_fp8 = per_token_group_quant_fp8  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, vllm_quantise._CALLER, module)
    vllm_quantise.install()
    quantise = module.per_token_group_quant_fp8
    vllm_quantise.install()
    assert module.per_token_group_quant_fp8 is quantise
    operator: Calls = []
    monkeypatch.setitem(operators._ENGINE, operators.GROUPS, lambda *given: operator.append(given))  # no GPU here
    x = torch.ones(3, 256, dtype=torch.bfloat16)
    for by_columns, strides in ((True, (1, 3)), (False, (2, 1))):
        out, scales = quantise(x, 128, column_major_scales=by_columns, use_ue8m0=True)
        assert (out.dtype, out.shape, scales.shape, scales.stride()) == (FP8, x.shape, (3, 2), strides)
        assert operator.pop()[3:] == (128, 1e-10, -448.0, 448.0, True, by_columns, False)
    plain = {"column_major_scales": True, "use_ue8m0": False}
    assert not made
    others: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (x, {**plain, "use_ue8m0": None}),
        (x, {"column_major_scales": True}),
        (x, {**plain, "tma_aligned_scales": True}),
        (x.t(), plain),
        (x[None], plain),
    ]
    for given, named in others:
        assert quantise(given, 128, **named) == ("vLLM's", "scales")
        assert made.pop() == (128, named)
    assert not operator


def test_a_table_without_the_operator_leaves_all_to_the_engine(engine: types.SimpleNamespace) -> None:
    engine.activations[KEY] = "another operator"
    with pytest.raises(RuntimeError, match="FUSED_OPS has no rms_norm_per_block_quant or silu_and_mul_per_block_quant"):
        vllm_quantise.install()
    assert all(each is engine.own[operators.NORM] for _, each in engine.norms.items())


def test_a_pass_that_names_the_operators_leaves_all_to_the_engine(engine: types.SimpleNamespace) -> None:
    def named(self: Any, graph: Any) -> None:
        if graph.target == torch.ops._C.silu_and_mul_per_block_quant.default:
            raise NotImplementedError

    engine.fix.__call__ = named
    with pytest.raises(RuntimeError, match="fix_functionalization treats silu_and_mul_per_block_quant by name"):
        vllm_quantise.install()


def test_another_schema_is_named() -> None:
    library = torch.library.Library("gemmpipe_test_quantisers", "DEF")
    library.define("one(Tensor(a!) out, Tensor input, Tensor(b!) scales, int group_size) -> ()")
    library.define(f"two{operators.SCHEMAS[operators.SILU].replace('Tensor(b!)', 'Tensor')}")
    library.define(f"three{operators.SCHEMAS[operators.SILU]}")
    found = [
        vllm_quantise.schema_difference(operators.SILU, getattr(torch.ops.gemmpipe_test_quantisers, name).default)
        for name in ("one", "two", "three")
    ]
    assert found == [
        "silu_and_mul_per_block_quant: 4 arguments, expected 6",
        "silu_and_mul_per_block_quant: argument Tensor scales, expected Tensor (written) scales",
        "",
    ]


def test_a_norm_in_a_graph_writes_its_sum_apart(calls: Calls) -> None:
    """The users of the three results keep them; a norm without a residual, and other nodes, stay."""
    ours = torch.ops.gemmpipe.rms_norm_per_block_quant.default
    graph = torch.fx.Graph()
    names = ("result", "input", "weight", "scale", "residual")
    with FakeTensorMode():
        values = [*norm_operands(), torch.ones(3, 256).bfloat16()]
    nodes = {name: graph.placeholder(name) for name in names}
    for node, value in zip(nodes.values(), values, strict=True):
        node.meta["val"] = value
    rest = {"epsilon": 1e-6, "scale_ub": None, "group_size": 128, "is_scale_transposed": True}
    plain = graph.call_function(auto_functionalized, (ours,), {**nodes, **rest, "residual": None})
    added = graph.call_function(auto_functionalized, (ours,), {**nodes, **rest})
    added.meta["eager_input_vals"] = (ours,), {**dict(zip(names, values, strict=True)), **rest}
    parts = [graph.call_function(vllm_quantise_getitem, (added, i)) for i in (1, 2, 3)]
    graph.output((plain, *parts))
    assert vllm_quantise.residuals_apart(graph) == 1
    graph.lint()
    made = parts[0].args[0]
    assert isinstance(made, torch.fx.Node)
    assert made.args == (torch.ops.gemmpipe.rms_norm_per_block_quant_out.default,)
    assert all(part.args[0] is made for part in parts)
    assert made.kwargs["residual"] is nodes["residual"]
    total = made.kwargs["total"]
    assert isinstance(total, torch.fx.Node)
    assert total.target is torch.ops.aten.empty_like.default
    storages = {each.meta["val"].untyped_storage()._cdata for each in (total, nodes["residual"])}
    assert len(storages) == 2
    assert set(made.meta["eager_input_vals"][1]) == set(made.kwargs)
    assert plain.args == (ours,)
    assert vllm_quantise.residuals_apart(graph) == 0


def vllm_quantise_getitem(parts: Any, i: int) -> Any:
    """A function of a graph that takes one of several results."""
    return parts[i]


def config(**passes: bool) -> Any:
    return types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(mode=3, pass_config=types.SimpleNamespace(**passes))
    )


@pytest.mark.parametrize(
    ("given", "gfx", "text"),
    [
        (config(fuse_norm_quant=True, fuse_act_quant=True), "sm_90", "quantisers (RMS norm and SiLU)"),
        (config(fuse_norm_quant=True, fuse_act_quant=False), "sm_90", "quantisers (RMS norm)"),
        (config(fuse_norm_quant=False), "sm_90", "quantisers (fuse_norm_quant and fuse_act_quant are off)"),
        (config(fuse_norm_quant=True), "sm_80", "quantisers (sm_80 is older than sm_89)"),
        (types.SimpleNamespace(compilation_config=types.SimpleNamespace(mode=0)), "sm_90", "(nothing is compiled)"),
        (None, "sm_90", "quantisers (RMS norm and SiLU)"),
    ],
)
def test_the_start_line_says_what_is_quantised(
    monkeypatch: pytest.MonkeyPatch, given: Any, gfx: str, text: str
) -> None:
    monkeypatch.setattr(vllm_notice, "current_config", lambda: given)
    notice = vllm_notice.Notice(scope=Scope(variable="GEMMPIPE_VLLM", kinds=(QUANTISE,)))
    found = notice._quantisers(device_of(gfx))
    assert text in str(found)
    assert found.taken == ("RMS norm" in text)
    notice.reasons[QUANTISE] = "GEMMPIPE_VLLM=linear"
    assert str(notice._quantisers(device_of(gfx))) == "quantisers (GEMMPIPE_VLLM=linear)"
