"""The kernels and the library paths on a GPU at real sizes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from gemmpipe.backends.aten import Torch
from gemmpipe.backends.scaled_mm import ScaledMm
from gemmpipe.core.data import Device, Scalar
from gemmpipe.core.device import DeviceChoice
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, KernelDefaults, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.launch.build import load_build, loaded_facts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
Options = Mapping[str, object]
DENSE: list[tuple[str, Options]] = [
    ("a16w16", {"bias": True}),
    ("a16w16", {"dtype": "float8_e4m3fn"}),
    ("a8w8", {}),
    ("a8w8", {"dtype": "int8", "bias": True}),
    ("a8w8_blockscale", {}),
]


@pytest.fixture(scope="module")
def device() -> Device:
    return DeviceChoice(kind="auto", index=0, shared=False).find()[0]


def made(
    name: str, device: Device, mnk: tuple[int, int, int], options: Options
) -> tuple[Family, GemmSpec, Weights, Inputs]:
    family = load_family(name)
    defaults = KernelDefaults(**{"dtype": None, "out_dtype": None, "bias": None, **options})  # type: ignore[arg-type]
    spec = family.spec(make_problem(family, dict(zip("MNK", mnk, strict=True)), defaults, device.gfx, "test"))
    generator = torch.Generator(device=device.torch_name).manual_seed(11)
    return family, spec, family.make_weights(spec, generator), family.make_inputs(spec, generator)


def check(
    implementation: Implementation,
    knobs: Mapping[str, Scalar],
    device: Device,
    case: tuple[Family, GemmSpec, Weights, Inputs],
) -> None:
    """Right eagerly and in a replayed CUDA graph, twice the same bits."""
    family, spec, weights, inputs = case
    knobs = implementation.normalise(spec, knobs, device)
    assert implementation.unsupported_reason(spec, knobs, device) is None
    out = torch.full((spec.m, spec.n), float("nan"), dtype=getattr(torch, spec.out_dtype), device=device.torch_name)
    launch = implementation.bind(spec, knobs, device, inputs, implementation.prepare(spec, weights, knobs), out)
    reference, tolerance = family.reference(spec, inputs, weights), family.tolerance(spec)
    first = launch().clone()
    assert error_ratio(first, reference, *tolerance) < 0.01
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = launch()
    captured.fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, first)


def knobs_of(m: int, n: int, k: int, splits: int, warps: int, stages: int) -> dict[str, Scalar]:
    return {
        "BLOCK_SIZE_M": m,
        "BLOCK_SIZE_N": n,
        "BLOCK_SIZE_K": k,
        "GROUP_SIZE_M": 8,
        "NUM_KSPLIT": splits,
        "num_warps": warps,
        "num_stages": stages,
        "cache_modifier": ".cg" if splits > 1 else "",
    }


@pytest.mark.parametrize("knobs", [(16, 64, 128, 8, 4, 2), (64, 128, 128, 1, 4, 2), (16, 256, 64, 4, 8, 2)])
@pytest.mark.parametrize("mnk", [(1, 1280, 8192), (64, 7168, 8192), (77, 1300, 1000)])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_blockscale(device: Device, mnk: tuple[int, int, int], knobs: tuple[int, ...], out: str) -> None:
    case = made("a8w8_blockscale", device, mnk, {"out_dtype": out})
    check(case[0].implementations[0], knobs_of(*knobs), device, case)


@pytest.mark.parametrize("knobs", [(16, 64, 64, 8, 4, 2), (64, 128, 32, 1, 4, 3), (64, 64, 64, 3, 8, 2)])
@pytest.mark.parametrize("mnk", [(1, 1280, 8192), (64, 7168, 8192), (77, 1300, 1000)])
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "float16", "bias": True}, {"out_dtype": "float32", "bias": True}, {"fp8": 1}]
)
def test_a16w16(device: Device, mnk: tuple[int, int, int], knobs: tuple[int, ...], options: dict[str, object]) -> None:
    if "fp8" in options:
        options = {"dtype": "float8_e4m3fnuz" if device.gfx == "gfx942" else "float8_e4m3fn", "bias": True}
    case = made("a16w16", device, mnk, options)
    check(case[0].implementations[0], knobs_of(*knobs), device, case)


@pytest.mark.parametrize("knobs", [(16, 64, 128, 8, 4, 4), (64, 128, 128, 1, 4, 3), (16, 256, 128, 4, 8, 2)])
@pytest.mark.parametrize("mnk", [(1, 1280, 8192), (64, 7168, 8192), (77, 1300, 1000)])
@pytest.mark.parametrize("name", ["a8w8_blockscale", "a16w16"])
def test_swapped_operands(device: Device, name: str, mnk: tuple[int, int, int], knobs: tuple[int, ...]) -> None:
    if device.vendor != "nvidia":
        pytest.skip("swapping is for Hopper's 64-row instruction")
    half = {"BLOCK_SIZE_K": 64} if name == "a16w16" else {}
    case = made(name, device, mnk, {})
    check(case[0].implementations[0], {**knobs_of(*knobs), **half, "SWAP_AB": True}, device, case)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("m", "n", "stages"),
    [
        *[
            (128, 128, 6),
            (64, 128, 6),
            (64, 256, 4),
            (128, 64, 8),
            (64, 64, 4),
            (128, 80, 6),
            (128, 96, 5),
            (64, 160, 5),
        ],
        *[(128, 112, 5), (128, 144, 5), (128, 160, 5), (128, 192, 5), (64, 224, 4)],  # in turns
    ],
)
@pytest.mark.parametrize(
    "mnk",
    [(128, 4608, 7168), (68, 1320, 1040), (1024, 7168, 8192), (192, 1280, 512), (4, 72, 96), (1096, 2120, 1200)],
)
def test_warp_specialised(device: Device, mnk: tuple[int, int, int], m: int, n: int, stages: int, splits: int) -> None:
    check_gluon(device, made("a8w8_blockscale", device, mnk, {}), knobs_of(m, n, 128, splits, 4, stages))


@pytest.mark.parametrize(
    ("m", "n", "stages", "own"),
    [
        *[(256, 128, 4, False), (256, 128, 3, False), (256, 96, 4, False), (256, 80, 4, False), (256, 64, 5, False)],
        *[(256, 112, 4, False), (128, 64, 8, True), (128, 128, 6, True), (128, 144, 6, True), (128, 160, 5, True)],
        *[(128, 96, 7, True), (128, 192, 4, True)],
    ],
)
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("mnk", [(1024, 7168, 8192), (256, 1280, 512), (260, 1320, 1040), (1096, 2120, 1200)])
def test_waves(
    device: Device, mnk: tuple[int, int, int], m: int, n: int, stages: int, own: bool, constant: bool
) -> None:
    knobs = {**knobs_of(m, n, 128, 1, 4, stages), "OWN_PACE": own, "CONSTANT_NK": constant}
    check_gluon(device, made("a8w8_blockscale", device, mnk, {}), knobs)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("n", "stages"), [(64, 6), (32, 8)])
@pytest.mark.parametrize("mnk", [(64, 4608, 7168), (24, 1320, 1040), (256, 7168, 512), (4, 72, 96)])
@pytest.mark.parametrize("name", ["a8w8_blockscale", "a16w16", "a8w8"])
def test_two_programs_per_multiprocessor(
    device: Device, name: str, mnk: tuple[int, int, int], n: int, stages: int, splits: int
) -> None:
    knobs = knobs_of(64, n, 64 if name == "a16w16" else 128, splits, 4, stages)
    check_gluon(device, made(name, device, mnk, {}), {**knobs, "CTAS_PER_SM": 2})


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("m", "n", "stages"),
    [(64, 32, 8), (64, 128, 6), (128, 128, 4), (128, 96, 5), (64, 160, 4), (128, 144, 4), (128, 160, 4), (128, 192, 4)],
)
@pytest.mark.parametrize("mnk", [(64, 1280, 8192), (4, 72, 1040), (192, 520, 2048), (256, 7168, 512)])
@pytest.mark.parametrize("name", ["a8w8_blockscale", "a16w16", "a8w8"])
def test_splits_of_a_tile_form_a_cluster(
    device: Device, name: str, mnk: tuple[int, int, int], m: int, n: int, stages: int, splits: int
) -> None:
    """One split: neighbours are a cluster; splits that need more than one wave are unsupported and do not run."""
    knobs = knobs_of(m, n, 64 if name == "a16w16" else 128, splits, 4, stages)
    options = {} if name == "a8w8_blockscale" else {"bias": True}
    check_gluon(device, made(name, device, mnk, options), {**knobs, "GROUP_SIZE_M": 16, "CLUSTER_SIZE": max(2, splits)})


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("m", "n", "stages"),
    [(128, 256, 4), (128, 128, 6), (64, 128, 6), (64, 32, 4), (128, 160, 5), (128, 208, 4), (64, 96, 6)],
)
@pytest.mark.parametrize("mnk", [(128, 4608, 2048), (1, 1320, 1040), (1027, 1280, 512), (1030, 2312, 1200)])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a16w16", {"bias": True}),
        ("a16w16", {"dtype": "float16"}),
        ("a16w16", {"dtype": "float8_e4m3fn", "bias": True}),
        ("a8w8", {"bias": True}),
        ("a8w8", {"dtype": "int8"}),
    ],
)
def test_dense_warp_specialised(
    device: Device,
    mnk: tuple[int, int, int],
    name: str,
    options: Options,
    m: int,
    n: int,
    stages: int,
    splits: int,
) -> None:
    k = 64 if name == "a16w16" and options.get("dtype") != "float8_e4m3fn" else 128
    check_gluon(device, made(name, device, mnk, options), knobs_of(m, n, k, splits, 4, stages))


def check_gluon(device: Device, case: tuple[Family, GemmSpec, Weights, Inputs], knobs: Mapping[str, Scalar]) -> None:
    """`check`, unless splits need more than one wave, or for int8 in 256 columns, which no kernel supports."""
    if device.gfx != "sm_90":
        pytest.skip("Hopper's kernel")
    kernel = next(i for i in case[0].implementations if i.label == "gluon")
    knobs = {**knobs, "kernel_type": "warp_specialised"}
    reason = kernel.unsupported_reason(case[1], kernel.normalise(case[1], knobs, device), device) or ""
    if "do not share clusters" in reason or (case[1].x_dtype == "int8" and "256 columns" in reason):
        pytest.skip(reason)
    check(kernel, knobs, device, case)


@pytest.mark.parametrize("mnk", [(1, 1280, 8192), (2, 7168, 2048), (5, 1300, 1000), (16, 1024, 512)])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("name", "options"), DENSE)
def test_skinny(device: Device, mnk: tuple[int, int, int], stages: int, name: str, options: Options) -> None:
    case = made(name, device, mnk, options)
    kernel = next(i for i in case[0].implementations if i.label == "skinny")
    rows = min(4, 1 << (mnk[0].bit_length() - 1))
    check(kernel, knobs_of(rows, 4, 512, 1, 2, stages), device, case)


@pytest.mark.parametrize("mnk", [(1, 1280, 8192), (8, 7168, 2048), (13, 1300, 1000), (33, 1030, 528)])
@pytest.mark.parametrize("tile", [(8, 16, 1024, 1, 8, 3), (16, 8, 256, 1, 4, 4), (32, 16, 512, 1, 8, 4)])
@pytest.mark.parametrize(("name", "options"), DENSE)
def test_sliced(device: Device, mnk: tuple[int, int, int], tile: tuple[int, ...], name: str, options: Options) -> None:
    case = made(name, device, mnk, options)
    check(next(i for i in case[0].implementations if i.label == "sliced"), knobs_of(*tile), device, case)


def test_split_k_survives_many_launches(device: Device) -> None:
    """A counter that is not reset, or a part read too early, shows up within some of a thousand launches."""
    case = family, spec, weights, inputs = made("a8w8_blockscale", device, (16, 8192, 3584), {})
    kernel = case[0].implementations[0]
    knobs = kernel.normalise(spec, knobs_of(16, 64, 128, 7, 4, 3), device)
    out = torch.empty(spec.m, spec.n, dtype=torch.bfloat16, device=device.torch_name)
    launch = kernel.bind(spec, knobs, device, inputs, kernel.prepare(spec, weights, knobs), out)
    first = launch().clone()
    assert error_ratio(first, family.reference(spec, inputs, weights), *family.tolerance(spec)) < 0.01
    for _ in range(1000):
        out.fill_(float("nan"))
        assert torch.equal(launch(), first)


@pytest.mark.parametrize(("label", "tile"), [("triton", (16, 64, 64, 4, 4, 4)), ("sliced", (16, 16, 256, 1, 4, 4))])
def test_overlapping_launches_wait_for_one_another(device: Device, label: str, tile: tuple[int, ...]) -> None:
    """Each reads the previous one's output: without a wait, one of a hundred chained products would read too early."""
    family, spec, weights, inputs = made("a16w16", device, (16, 1024, 1024), {})
    kernel = next(i for i in family.implementations if i.label == label)
    knobs = kernel.normalise(spec, knobs_of(*tile), device)
    prepared, ends = kernel.prepare(spec, weights, knobs), [inputs.x.clone(), torch.empty_like(inputs.x)]
    steps = [kernel.bind(spec, knobs, device, replace(inputs, x=ends[i]), prepared, ends[1 - i]) for i in range(2)]
    expected = inputs.x
    for _ in range(100):
        expected = kernel.bind(spec, knobs, device, replace(inputs, x=expected), prepared, torch.empty_like(expected))()
        torch.cuda.synchronize()
    for i in range(100):
        steps[i % 2]()
    assert torch.equal(ends[0], expected)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 1280, 8192), (256, 2304, 2304), (4096, 1024, 3200)])
def test_scaled_mm_with_block_scales(device: Device, m: int, n: int, k: int) -> None:
    if device.gfx != "sm_90":
        pytest.skip("cuBLASLt has block scales on sm_90 alone")
    check(ScaledMm(), {"use_fast_accum": False}, device, made("a8w8_blockscale", device, (m, n, k), {}))


@pytest.mark.parametrize("method", ["bfloat16_copy", "bfloat16_convert"])
def test_torch_dequantises(device: Device, method: str) -> None:
    check(Torch(), {"method": method}, device, made("a8w8_blockscale", device, (64, 1280, 8192), {}))


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"out_dtype": "float32"}])
def test_torch_mm(device: Device, options: dict[str, object]) -> None:
    check(Torch(), {"method": "mm"}, device, made("a16w16", device, (64, 1280, 8192), options))


def test_facts_of_a_loaded_build(device: Device) -> None:
    family, spec, _, _ = made("a16w16", device, (64, 1280, 8192), {})
    kernel = family.implementations[0]
    (build,) = kernel.builds(spec, kernel.normalise(spec, knobs_of(64, 64, 64, 1, 4, 3), device), device)
    facts = loaded_facts(load_build(build, device))
    assert facts.registers
    assert facts.shared_bytes
    assert facts.spills == 0
