"""Fused experts on a GPU at real sizes: Triton in all its forms and torch's grouped products, also in a graph."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from gemmpipe.backends.aten import Torch
from gemmpipe.core.data import Device, Scalar
from gemmpipe.core.device import DeviceChoice
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, KernelDefaults, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.family.space import Space
from gemmpipe.runtime import fused_moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
Case = tuple[Family, GemmSpec, Weights, Inputs]
QUANTISATIONS: dict[str, tuple[str | None, dict[str, object]]] = {
    "bf16": (None, {}),
    "fp16_gelu": ("float16", {"act_type": "gelu"}),
    "per_token": ("fp8", {"q_type": "per_token"}),
    "block": ("fp8", {}),
    "ungated_first": (None, {"use_g1u1": 0, "doweight_stage1": 1}),
    "first": (None, {"doweight_stage1": 1}),
    "per_token_first": ("fp8", {"q_type": "per_token", "doweight_stage1": 1, "use_g1u1": 0}),
    "block_first": ("fp8", {"doweight_stage1": 1, "act_type": "gelu"}),
}
SIZES = {  # token, model_dim, inter_dim, expert, topk
    "decode": (1, 2048, 768, 128, 8),
    "odd": (77, 1040, 208, 12, 3),
    "prefill": (515, 2048, 768, 128, 8),
    "one_of_four": (300, 1024, 512, 4, 1),
    "many_experts": (64, 512, 128, 512, 10),
    "many_pairs": (900, 512, 128, 512, 10),
}
KNOBS: list[dict[str, Scalar]] = [
    {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_warps": 4, "num_stages": 3},
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "num_warps": 4, "num_stages": 3, "FUSED_ACT": True},
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "num_warps": 8, "num_stages": 3, "GROUP_SIZE_M": 16},
    {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "num_warps": 4, "num_stages": 2, "BLOCK_SIZE_N_2": 64}
    | {"BLOCK_SIZE_K_2": 128, "num_warps_2": 8, "num_stages_2": 3, "FUSED_ACT": True},
    {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "num_warps": 4, "num_stages": 3, "OVERLAP": True},
]

GROUPED_SIZES = {  # as SIZES
    **SIZES,
    "one": (1, 2048, 512, 3, 1),
    "each_of_eight": (333, 512, 384, 8, 8),
    "uneven": (1031, 1024, 336, 40, 5),
    "long": (1090, 1024, 1536, 9, 2),
}
GROUPED: list[tuple[int, int, dict[str, Scalar]]] = [  # rows, columns of a tile
    (64, 128, {"num_stages": 6, "GROUP_SIZE_M": 1}),
    (64, 64, {"num_stages": 8, "GROUP_SIZE_M": 1, "BLOCK_SIZE_N_2": 128, "num_stages_2": 6, "GROUP_SIZE_M_2": 4}),
    (64, 256, {"num_stages": 4, "GROUP_SIZE_M": 2, "FUSED_ACT": True, "BLOCK_SIZE_N_2": 64}),
    (128, 128, {"num_stages": 5, "GROUP_SIZE_M": 1}),
    (128, 128, {"num_stages": 5, "GROUP_SIZE_M": 3, "FUSED_ACT": True}),
    (128, 256, {"num_stages": 3, "GROUP_SIZE_M": 1}),
    (128, 256, {"num_stages": 4, "GROUP_SIZE_M": 1, "FUSED_ACT": True}),
    (64, 128, {"num_stages": 6, "GROUP_SIZE_M": 1, "PINGPONG": True, "num_stages_2": 4}),
    (
        64,
        256,
        {"num_stages": 4, "GROUP_SIZE_M": 8, "FUSED_ACT": True, "BLOCK_SIZE_N_2": 64, "num_stages_2": 8}
        | {"PINGPONG": True, "GATHER_ROWS": True},
    ),
    (64, 128, {"num_stages": 6, "GROUP_SIZE_M": 1, "GATHER_ROWS": True}),
    (64, 256, {"num_stages": 3, "GROUP_SIZE_M": 8, "GATHER_ROWS": True, "FUSED_ACT": True}),
    (128, 128, {"num_stages": 5, "GROUP_SIZE_M": 3, "GATHER_ROWS": True, "FUSED_ACT": True}),
    (128, 256, {"num_stages": 4, "GROUP_SIZE_M": 1, "GATHER_ROWS": True, "FUSED_ACT": True}),
    (64, 128, {"num_stages": 6, "GROUP_SIZE_M": 1, "FUSED_SUM": True, "BLOCK_SIZE_N_2": 64, "num_stages_2": 8}),
    (128, 128, {"num_stages": 5, "GROUP_SIZE_M": 1, "FUSED_SUM": True, "GROUP_SIZE_M_2": 32}),
    (128, 256, {"num_stages": 3, "GROUP_SIZE_M": 2, "FUSED_SUM": True, "GATHER_ROWS": True}),
    (
        64,
        256,
        {"num_stages": 4, "GROUP_SIZE_M": 8, "FUSED_ACT": True, "BLOCK_SIZE_N_2": 128, "GROUP_SIZE_M_2": 32}
        | {"PINGPONG": True, "GATHER_ROWS": True, "FUSED_SUM": True},
    ),
]


FLAGS = ("GATHER_ROWS", "PINGPONG", "FUSED_SUM")


@pytest.fixture(scope="module")
def device() -> Device:
    return DeviceChoice(kind="auto", index=0, shared=False).find()[0]


def made(device: Device, size: str, quantisation: str) -> Case:
    family, (dtype, key) = load_family("fmoe"), QUANTISATIONS[quantisation]
    names = ("token", "model_dim", "inter_dim", "expert", "topk")
    defaults = KernelDefaults(dtype=dtype, out_dtype=None, bias=None)
    problem = make_problem(
        family,
        {**dict(zip(names, {**GROUPED_SIZES, **FEW_SIZES}[size], strict=True)), **key},
        defaults,
        device.gfx,
        "test",
    )
    spec = family.spec(problem)
    generator = torch.Generator(device=device.torch_name).manual_seed(11)
    return family, spec, family.make_weights(spec, generator), family.make_inputs(spec, generator)


def check(implementation: Implementation, knobs: Mapping[str, Scalar], device: Device, case: Case) -> None:
    """Right eagerly and in a replayed CUDA graph, the same bits both times unless the order of additions varies."""
    family, spec, weights, inputs = case
    out = torch.full(spec.out_shape, float("nan"), dtype=getattr(torch, spec.out_dtype), device=device.torch_name)
    launch = implementation.bind(spec, knobs, device, inputs, implementation.prepare(spec, weights, knobs), out)
    assert inputs.topk_ids is not None
    assert inputs.topk_weights is not None
    known = inputs.topk_ids >= 0
    here = replace(inputs, topk_ids=inputs.topk_ids * known, topk_weights=inputs.topk_weights * known)
    reference, tolerance = family.reference(spec, here, weights), family.tolerance(spec)
    first = launch().clone()
    assert error_ratio(first, reference.clone(), *tolerance) < 0.04, knobs
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = launch()
    captured.fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    if knobs.get("FUSED_SUM"):
        assert error_ratio(captured, reference.clone(), *tolerance) < 0.04, knobs
    else:
        assert torch.equal(captured, first), knobs


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_triton(device: Device, size: str, quantisation: str) -> None:
    case = made(device, size, quantisation)
    kernel = case[0].implementations[0]
    ran = 0
    for knobs in KNOBS:
        normal = kernel.normalise(case[1], knobs, device)
        if kernel.unsupported_reason(case[1], normal, device) is None:
            check(kernel, normal, device, case)
            ran += 1
    assert ran == len(KNOBS)


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize("size", GROUPED_SIZES)
def test_warp_specialised(device: Device, size: str, quantisation: str) -> None:
    if device.gfx != "sm_90":
        pytest.skip("warpgroup instructions are sm_90's")
    case = made(device, size, quantisation)
    kernel, deep = case[0].implementations[1], 128 if case[1].w_dtype.startswith("float8") else 64
    unfit = set()
    for m, n, more in GROUPED:
        tile: dict[str, Scalar] = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": deep}
        normal = kernel.normalise(case[1], {"kernel_type": "warp_specialised", **tile, **more}, device)
        reason = kernel.unsupported_reason(case[1], normal, device)
        if reason is None:
            check(kernel, normal, device, case)
        else:
            unfit.add(reason.split(":")[0])
    assert unfit <= ({"registers", "fused activation"} if quantisation.startswith("block") else set())


@pytest.mark.parametrize("size", ["prefill", "many_experts", "many_pairs"])
@pytest.mark.parametrize("quantisation", ["bf16", "block"])
def test_uneven_orders(device: Device, size: str, quantisation: str) -> None:
    """All rows have one expert, or the same ones; or most pairs have one of another rank (not for the plain kernel)."""
    case = made(device, size, quantisation)
    _, spec, _, inputs = case
    assert inputs.topk_ids is not None
    assert spec.experts is not None
    count, topk = spec.experts.count, spec.experts.topk
    one, same, away = (inputs.topk_ids.clone() for _ in range(3))
    one[:] = count - 1
    same[:] = torch.arange(topk, dtype=same.dtype, device=same.device) * (count // topk)
    away[:, 1:] = -1
    plain, grouped = case[0].implementations[:2]
    tile: dict[str, Scalar] = {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 128,
        "BLOCK_SIZE_K": 128 if quantisation == "block" else 64,
    }
    knobs = [(plain, KNOBS[0]), (plain, KNOBS[4])]
    if device.gfx == "sm_90":
        own: dict[str, Scalar] = {"kernel_type": "warp_specialised", **tile, "num_stages": 4, "GROUP_SIZE_M": 1}
        knobs += [(grouped, own), (grouped, own | {"GATHER_ROWS": True, "PINGPONG": True})]
        knobs += [(grouped, own | {"FUSED_SUM": True}), (grouped, own | dict.fromkeys(FLAGS, True))]
    for kernel, chosen in knobs:
        normal = kernel.normalise(spec, chosen, device)
        assert kernel.unsupported_reason(spec, normal, device) is None
        for ids in (one, same, away)[: 3 if kernel is grouped else 2]:
            check(kernel, normal, device, (*case[:3], replace(inputs, topk_ids=ids)))


FEW_SIZES = {  # as SIZES, of few pairs
    "decode": (1, 2048, 768, 128, 8),
    "few_of_many": (4, 2048, 512, 512, 10),
    "odd": (77, 1040, 208, 12, 3),
    "crowded": (100, 1024, 512, 3, 2),
    "one": (1, 2048, 512, 3, 1),
}
FEW: dict[str, list[dict[str, Scalar]]] = {
    "skinny": [
        {"BLOCK_SIZE_N": 4, "BLOCK_SIZE_K": 512, "num_warps": 1, "num_stages": 1},
        {"BLOCK_SIZE_N": 8, "BLOCK_SIZE_K": 1024, "num_warps": 4, "num_stages": 2, "BLOCK_SIZE_K_2": 256},
    ],
}


@pytest.mark.parametrize("label", FEW)
@pytest.mark.parametrize("size", FEW_SIZES)
@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_few_rows(device: Device, label: str, size: str, quantisation: str) -> None:
    case = made(device, size, quantisation)
    kernel = next(each for each in case[0].implementations if each.label == label)
    for knobs in FEW[label]:
        normal = kernel.normalise(case[1], knobs, device)
        assert kernel.unsupported_reason(case[1], normal, device) is None
        check(kernel, normal, device, case)
        crowded, alone = case[3].topk_ids.clone(), case[3].topk_ids.clone()  # type: ignore[union-attr]
        crowded[:] = 0  # one expert for all, several times a row
        alone[1:] = -1  # experts of another rank
        for ids in (crowded, alone):
            check(kernel, normal, device, (*case[:3], replace(case[3], topk_ids=ids)))


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_grouped_products(device: Device, quantisation: str) -> None:
    case = made(device, "prefill", quantisation)
    backend = Torch()
    points = list(backend.configs(case[1], device, Space(axes={}, when=(), pinned=())))
    fit = [knobs for knobs in points if backend.unsupported_reason(case[1], knobs, device) is None]
    for knobs in fit:
        check(backend, knobs, device, case)
    assert bool(fit) == (case[1].x_dtype == "bfloat16")
    assert (quantisation.startswith("per_token") and device.gfx == "sm_90") == ({"method": "scaled_grouped_mm"} in fit)


@pytest.mark.parametrize("quantisation", ["bf16", "fp16_gelu", "per_token", "block"])
def test_the_run_time_function(device: Device, quantisation: str) -> None:
    family, spec, weights, inputs = made(device, "odd", quantisation)
    assert weights.w2 is not None
    assert spec.experts is not None
    act = spec.experts.activation
    routing = (inputs.topk_weights, inputs.topk_ids)
    with torch.no_grad():
        out = fused_moe(inputs.x, weights.w, weights.w2, *routing, weights.w_scale, weights.w2_scale, act)
        again = fused_moe(inputs.x, weights.w, weights.w2, *routing, weights.w_scale, weights.w2_scale, act)
    assert error_ratio(out, family.reference(spec, inputs, weights), *family.tolerance(spec)) < 0.03
    assert torch.equal(out, again)
