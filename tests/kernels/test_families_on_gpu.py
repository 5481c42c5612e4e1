"""The quantised, shuffled, atomic and batched families on a GPU at real sizes: Triton and library paths."""

from collections.abc import Callable, Mapping

import pytest
import torch

from gemmpipe.backends.aten import Torch
from gemmpipe.backends.quantised_library import QuantisedLibrary
from gemmpipe.backends.scaled_mm import ScaledMm
from gemmpipe.core.data import Device, Scalar
from gemmpipe.core.device import DeviceChoice
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, KernelDefaults, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.family.space import Space
from gemmpipe.templates.tiled import TiledKernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
Case = tuple[Family, GemmSpec, Weights, Inputs]
INT8 = {"dtype": "int8"}
TENSOR = {"granularity": "tensor"}
PRODUCTS: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("a8w8", {}, {}),
    ("a8w8", TENSOR, {"bias": True}),
    ("a8w8", {}, {**INT8, "bias": True, "out_dtype": "float32"}),
    ("a8w8", TENSOR, INT8),
    ("batched_bf16", {"B": 5}, {}),
    ("batched_bf16", {"B": 5}, {"dtype": "float16", "out_dtype": "float32"}),
    ("batched_a8w8", {"B": 5}, {}),
    ("batched_a8w8", {"B": 5}, INT8),
    ("a16w16_atomic", {}, {}),
    ("a16w16_atomic", {}, {"dtype": "float16"}),
    ("a16w16_atomic", {}, {"out_dtype": "float32"}),
    ("a8w8_bpreshuffle", {}, {"bias": True}),
    ("a8w8_bpreshuffle", {}, INT8),
    ("a8w8_blockscale_bpreshuffle", {}, {}),
    ("a4w4_blockscale", {}, {}),
]
SIZES = [(1, 1280, 4096), (64, 7168, 2048), (77, 1296, 1056), (512, 1024, 1024)]
TILES = [  # BLOCK_SIZE_M, _N, _K, NUM_KSPLIT, num_warps, num_stages, SWAP_AB
    (16, 64, 128, 8, 4, 3, False),
    (64, 128, 64, 1, 4, 3, False),
    (16, 128, 128, 4, 4, 3, True),
    (64, 64, 128, 1, 4, 3, True),
    (64, 64, 128, 2, 8, 2, False),
]


@pytest.fixture(scope="module")
def device() -> Device:
    return DeviceChoice(kind="auto", index=0, shared=False).find()[0]


def made(
    name: str, device: Device, mnk: tuple[int, int, int], key: Mapping[str, object], options: Mapping[str, object]
) -> Case:
    family = load_family(name)
    defaults = KernelDefaults(**{"dtype": None, "out_dtype": None, "bias": None, **options})  # type: ignore[arg-type]
    values = {**dict(zip("MNK", mnk, strict=True)), **key}
    spec = family.spec(make_problem(family, values, defaults, device.gfx, "test"))
    generator = torch.Generator(device=device.torch_name).manual_seed(11)
    return family, spec, family.make_weights(spec, generator), family.make_inputs(spec, generator)


def check(implementation: Implementation, knobs: Mapping[str, Scalar], device: Device, case: Case) -> None:
    """Right eagerly and in a replayed CUDA graph."""
    family, spec, weights, inputs = case
    shape = (spec.m, spec.n) if spec.batch == 1 else (spec.batch, spec.m, spec.n)
    out = torch.full(shape, float("nan"), dtype=getattr(torch, spec.out_dtype), device=device.torch_name)
    launch = implementation.bind(spec, knobs, device, inputs, implementation.prepare(spec, weights, knobs), out)
    reference, tolerance = family.reference(spec, inputs, weights), family.tolerance(spec)
    assert error_ratio(launch(), reference, *tolerance) < 0.01, knobs
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = launch()
    captured.fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert error_ratio(captured, reference, *tolerance) < 0.01, knobs


@pytest.mark.parametrize("mnk", SIZES)
@pytest.mark.parametrize(("name", "key", "options"), PRODUCTS)
def test_triton(
    device: Device, mnk: tuple[int, int, int], name: str, key: dict[str, object], options: dict[str, object]
) -> None:
    case = made(name, device, mnk, key, options)
    kernel = case[0].implementations[0]
    assert isinstance(kernel, TiledKernel)
    ran = 0
    for m, n, k, splits, warps, stages, swap in TILES:
        if swap and not (kernel.supports_swap_ab and device.vendor == "nvidia"):
            continue
        knobs: dict[str, Scalar] = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "NUM_KSPLIT": splits}
        knobs |= {"GROUP_SIZE_M": 8, "num_warps": warps, "num_stages": stages, "SWAP_AB": swap, "cache_modifier": ""}
        normal = kernel.normalise(case[1], knobs, device)
        if kernel.unsupported_reason(case[1], normal, device) is None:
            check(kernel, normal, device, case)
            ran += 1
    assert ran >= 2


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("m", "n", "stages"), [(128, 256, 4), (128, 128, 6), (64, 128, 6), (64, 32, 8)])
@pytest.mark.parametrize("mnk", [(128, 7168, 2048), (76, 1296, 1056), (4096, 1296, 544), (4, 16, 32)])
@pytest.mark.parametrize(("name", "key", "options"), [case for case in PRODUCTS if "bpreshuffle" in case[0]])
def test_warp_specialised_on_tiles(
    device: Device,
    mnk: tuple[int, int, int],
    name: str,
    key: dict[str, object],
    options: dict[str, object],
    m: int,
    n: int,
    stages: int,
    splits: int,
) -> None:
    if device.gfx != "sm_90":
        pytest.skip("Hopper's kernel")
    case = made(name, device, mnk, key, options)
    kernel = next(i for i in case[0].implementations if i.label == "gluon")
    knobs: dict[str, Scalar] = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": 128, "NUM_KSPLIT": splits}
    knobs |= {"kernel_type": "warp_specialised", "GROUP_SIZE_M": 8, "num_stages": stages}
    normal = kernel.normalise(case[1], knobs, device)
    if kernel.unsupported_reason(case[1], normal, device):
        pytest.skip("the tile does not fit this problem")
    check(kernel, normal, device, case)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("n", "k"), [(8, 512), (16, 1024), (32, 512)])
@pytest.mark.parametrize("mnk", [(1, 1280, 4096), (3, 7168, 2048), (16, 1296, 1056), (2, 16, 32)])
@pytest.mark.parametrize(("name", "key", "options"), [case for case in PRODUCTS if "bpreshuffle" in case[0]])
def test_skinny_on_tiles(
    device: Device,
    mnk: tuple[int, int, int],
    name: str,
    key: dict[str, object],
    options: dict[str, object],
    n: int,
    k: int,
    stages: int,
) -> None:
    case = made(name, device, mnk, key, options)
    kernel = next(i for i in case[0].implementations if i.label == "skinny")
    rows = min(4, 1 << (mnk[0].bit_length() - 1))
    knobs: dict[str, Scalar] = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "num_warps": k // 128}
    normal = kernel.normalise(case[1], {**knobs, "kernel_type": "skinny", "num_stages": stages}, device)
    assert kernel.unsupported_reason(case[1], normal, device) is None
    check(kernel, normal, device, case)


@pytest.mark.parametrize("mnk", [SIZES[1], SIZES[2]])
@pytest.mark.parametrize(("name", "key", "options"), PRODUCTS)
@pytest.mark.parametrize("backend", [Torch(), ScaledMm()], ids=["torch", "scaled_mm"])
def test_libraries(
    backend: Torch | ScaledMm,
    device: Device,
    mnk: tuple[int, int, int],
    name: str,
    key: dict[str, object],
    options: dict[str, object],
) -> None:
    case = made(name, device, mnk, key, options)
    points = [
        backend.normalise(case[1], knobs, device)
        for knobs in backend.configs(case[1], device, Space(axes={}, when=(), pinned=()))
    ]
    fit = [knobs for knobs in points if backend.unsupported_reason(case[1], knobs, device) is None]
    for knobs in fit:
        check(backend, knobs, device, case)
    assert fit or isinstance(backend, ScaledMm)
    if name == "a8w8" and "dtype" not in options and mnk == SIZES[1]:
        assert fit


FUSED_SLICED = [(1, 16, 4, 5), (1, 64, 2, 3), (8, 32, 4, 4), (8, 16, 8, 3), (16, 16, 2, 3), (16, 64, 4, 3)]
"""BLOCK_SIZE_M, _N, num_warps, num_stages."""


def sliced_launch(
    label: str, tile: tuple[int, int, int, int], device: Device, case: Case, out: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """The launch of `fused_sliced` or, with 8 rows at least, of `sliced`."""
    family, spec, weights, inputs = case
    kernel = next(i for i in family.implementations if i.label == label)
    rows, columns, warps, stages = tile
    knobs: dict[str, Scalar] = {"BLOCK_SIZE_M": rows if label == "fused_sliced" else max(8, rows), "num_warps": warps}
    knobs |= {"BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": 128 * warps, "num_stages": stages}
    normal = kernel.normalise(spec, knobs, device)
    assert kernel.unsupported_reason(spec, normal, device) is None
    return kernel.bind(spec, normal, device, inputs, kernel.prepare(spec, weights, normal), out)


@pytest.mark.parametrize("tile", FUSED_SLICED)
@pytest.mark.parametrize("mnk", [(1, 1280, 8192), (3, 7168, 2048), (8, 1300, 1040), (13, 1296, 400), (16, 1030, 513)])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_fused_sliced(
    device: Device, mnk: tuple[int, int, int], tile: tuple[int, int, int, int], out_dtype: str
) -> None:
    if device.vendor != "nvidia":
        pytest.skip("NVIDIA's kernel")
    case = made("linear_fp8_blockscale", device, mnk, {}, {"out_dtype": out_dtype})
    kernel = next(i for i in case[0].implementations if i.label == "fused_sliced")
    rows, columns, warps, stages = tile
    knobs = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": 128 * warps, "num_warps": warps}
    check(kernel, kernel.normalise(case[1], {**knobs, "num_stages": stages}, device), device, case)


@pytest.mark.parametrize("tile", FUSED_SLICED)
def test_one_launch_has_the_bits_of_two(device: Device, tile: tuple[int, int, int, int]) -> None:
    """x of any size, with a block of zeros: quantised to the same values and scales, summed in the same order."""
    if device.vendor != "nvidia":
        pytest.skip("NVIDIA's kernel")
    family, spec, weights, inputs = made("linear_fp8_blockscale", device, (7, 1280, 4096), {}, {})
    sizes = torch.exp2(torch.randint(-30, 30, (spec.m, spec.k // 128, 1), device=inputs.x.device))
    values = torch.randn(spec.m, spec.k // 128, 128, device=inputs.x.device) * sizes
    values[3, 5] = 0
    case = family, spec, weights, Inputs(x=values.view(spec.m, spec.k).to(inputs.x.dtype))
    out = [torch.full(spec.out_shape, float("nan"), dtype=inputs.x.dtype, device=inputs.x.device) for _ in range(2)]
    labels = ("fused_sliced", "sliced")
    one, two = (sliced_launch(label, tile, device, case, to)() for label, to in zip(labels, out, strict=True))
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["linear_fp8_blockscale", "linear_fp8_row"])
@pytest.mark.parametrize("mnk", [(1, 1280, 4096), (6, 1280, 1024), (64, 7168, 2048), (300, 1536, 1152)])
def test_a_library_multiplies_what_our_kernel_quantised(device: Device, name: str, mnk: tuple[int, int, int]) -> None:
    case = made(name, device, mnk, {}, {})
    library = QuantisedLibrary()
    spec = case[1]
    knobs = library.normalise(spec, {"use_fast_accum": False}, device)
    if reason := library.unavailable(device) or library.unsupported_reason(spec, knobs, device):
        pytest.skip(reason)
    check(library, knobs, device, case)
