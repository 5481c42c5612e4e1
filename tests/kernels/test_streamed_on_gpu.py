"""The streamed kernels on a GPU: few rows in fp8 and in 16 bits, and of a linear layer that quantises x itself."""

from collections.abc import Mapping

import pytest
import torch

from gemmpipe.core.data import Device, Scalar
from gemmpipe.core.device import DeviceChoice
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, KernelDefaults, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
Case = tuple[Family, GemmSpec, Weights, Inputs]
SIZES = [(1280, 8192), (2112, 7168), (7168, 256), (32, 128), (3072, 1664)]
TILES = [(8, 8, 3), (16, 8, 1), (16, 2, 4), (16, 16, 2), (32, 4, 2)]
"""BLOCK_SIZE_N, num_warps, num_stages."""


@pytest.fixture(scope="module")
def device() -> Device:
    found = DeviceChoice(kind="auto", index=0, shared=False).find()[0]
    if found.vendor != "nvidia" or int(found.gfx.removeprefix("sm_")) < 89:
        pytest.skip("instructions of sm_89 and later")
    return found


def made(
    name: str, device: Device, m: int, n: int, k: int, out_dtype: str | None = None,
    key: Mapping[str, Scalar] = {}, dtype: str | None = None, bias: bool | None = None,
) -> Case:  # fmt: skip
    family, options = load_family(name), KernelDefaults(dtype=dtype, out_dtype=out_dtype, bias=bias)
    spec = family.spec(make_problem(family, {"M": m, "N": n, "K": k, **key}, options, device.gfx, "test"))
    generator = torch.Generator(device=device.torch_name).manual_seed(17)
    return family, spec, family.make_weights(spec, generator), family.make_inputs(spec, generator)


def kernel_of(case: Case, label: str) -> Implementation:
    return next(each for each in case[0].implementations if each.label == label)


def tile_of(spec: GemmSpec, tile: tuple[int, ...], rows: int | None = None) -> dict[str, Scalar]:
    columns, warps, stages = tile
    sides = {"BLOCK_SIZE_M": rows or 1 << (spec.m - 1).bit_length(), "BLOCK_SIZE_N": columns}
    return {**sides, "BLOCK_SIZE_K": 128 * warps, "num_warps": warps, "num_stages": stages}


def result(label: str, knobs: Mapping[str, Scalar], device: Device, case: Case) -> torch.Tensor:
    """Over NaN; a tile that does not fit these sizes is skipped."""
    _, spec, weights, inputs = case
    kernel = kernel_of(case, label)
    kept = kernel.normalise(spec, knobs, device)
    if reason := kernel.unsupported_reason(spec, kept, device):
        assert reason.startswith(("instructions:", "shared memory:")), reason
        pytest.skip(reason)
    out = torch.full(spec.out_shape, float("nan"), dtype=getattr(torch, spec.out_dtype), device=device.torch_name)
    launched = kernel.bind(spec, kept, device, inputs, kernel.prepare(spec, weights, kept), out)()
    assert isinstance(launched, torch.Tensor)
    return launched


def assert_right(found: torch.Tensor, case: Case) -> None:
    family, spec, weights, inputs = case
    assert error_ratio(found, family.reference(spec, inputs, weights), *family.tolerance(spec)) == 0


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("nk", SIZES)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 8])
def test_products_of_fp8_operands(device: Device, m: int, nk: tuple[int, int], tile: tuple[int, ...]) -> None:
    """Scales of x in both memory orders, in every type of the output."""
    for out_dtype in ("bfloat16", "float16", "float32"):
        case = made("a8w8_blockscale", device, m, *nk, out_dtype)
        by_rows = result("streamed", tile_of(case[1], tile), device, case)
        assert_right(by_rows, case)
        scales = case[3].x_scale
        assert scales is not None
        by_columns = Inputs(x=case[3].x, x_scale=scales.t().contiguous().t())
        again = result("streamed", tile_of(case[1], tile), device, (*case[:3], by_columns))
        assert torch.equal(again, by_rows)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("nk", SIZES)
@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["linear_fp8_blockscale", "linear_fp8_row"])
def test_linear_layers(
    device: Device, name: str, dtype: str, m: int, nk: tuple[int, int], tile: tuple[int, ...]
) -> None:
    case = made(name, device, m, *nk, dtype, bias=True if name == "linear_fp8_row" else None)
    assert_right(result("fused_streamed", tile_of(case[1], tile), device, case), case)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("nk", [*SIZES[:4], (3072, 1600)])
@pytest.mark.parametrize("m", [1, 2, 5, 8])
@pytest.mark.parametrize(("dtype", "out_dtype", "bias"), [
    ("bfloat16", "bfloat16", None), ("bfloat16", "float32", True), ("float16", "float16", True),
])  # fmt: skip
def test_products_in_16_bits(
    device: Device, dtype: str, out_dtype: str, bias: bool | None, m: int, nk: tuple[int, int], tile: tuple[int, ...]
) -> None:
    case = made("a16w16", device, m, *nk, out_dtype, {}, dtype, bias)
    assert_right(result("streamed", tile_of(case[1], tile), device, case), case)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("nk", SIZES[:4])
@pytest.mark.parametrize("m", [1, 2, 5, 8])
@pytest.mark.parametrize(("name", "key", "dtype", "bias"), [
    ("a8w8", {"granularity": "row"}, None, True), ("a8w8", {"granularity": "tensor"}, None, None),
    ("a16w16", {}, "float8_e4m3fn", True),
])  # fmt: skip
def test_products_of_fp8_operands_with_scales_at_the_end(
    device: Device, name: str, key: dict[str, Scalar], dtype: str | None, bias: bool | None, m: int,
    nk: tuple[int, int], tile: tuple[int, ...],
) -> None:  # fmt: skip
    case = made(name, device, m, *nk, None, key, dtype, bias)
    assert_right(result("streamed", tile_of(case[1], tile), device, case), case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_x_is_quantised_to_the_bits_of_the_quantiser(device: Device, m: int, dtype: str) -> None:
    """x of any size, with a block of zeros, times the identity: each value of the output is one quantised value."""
    family, spec, weights, inputs = made("linear_fp8_blockscale", device, m, 1280, 1280, dtype)
    exponents = (-30, 30) if dtype == "bfloat16" else (-12, 12)
    sizes = torch.exp2(torch.randint(*exponents, (spec.m, spec.k // 128, 1), device=inputs.x.device).float())
    values = torch.randn(spec.m, spec.k // 128, 128, device=inputs.x.device) * sizes
    values[m // 2, 5] = 0
    w = torch.eye(1280, device=inputs.x.device).to(weights.w.dtype)
    identity = Weights(w=w, w_scale=torch.ones(10, 10, device=w.device))
    case = family, spec, identity, Inputs(x=values.view(spec.m, spec.k).to(inputs.x.dtype))
    one = result("fused_streamed", tile_of(spec, (16, 8, 1)), device, case)
    sliced = {"BLOCK_SIZE_M": 1 if m == 1 else 8, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 1024, "num_warps": 8}
    assert torch.equal(one, result("fused_sliced", {**sliced, "num_stages": 3}, device, case))
    assert int((one[m // 2, 5 * 128 : 6 * 128] != 0).sum()) == 0
    assert int((one != 0).sum()) > spec.m * 1000


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_rows_of_x_are_quantised_to_the_bits_of_the_quantiser(device: Device, m: int, dtype: str) -> None:
    """x of any size, with a row of zeros, times the identity: each value of the output is one quantised value."""
    family, spec, weights, inputs = made("linear_fp8_row", device, m, 1280, 1280, dtype)
    exponents = (-30, 30) if dtype == "bfloat16" else (-12, 12)
    sizes = torch.exp2(torch.randint(*exponents, (spec.m, 1), device=inputs.x.device).float())
    values = torch.randn(spec.m, spec.k, device=inputs.x.device) * sizes
    values[m - 1] = 0 if m > 1 else values[m - 1]
    w = torch.eye(1280, device=inputs.x.device).to(weights.w.dtype)
    identity = Weights(w=w, w_scale=torch.ones(1280, 1, device=w.device))
    case = family, spec, identity, Inputs(x=values.to(inputs.x.dtype))
    one = result("fused_streamed", tile_of(spec, (16, 8, 1)), device, case)
    sliced = {"BLOCK_SIZE_M": 8, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 1024, "num_warps": 8, "num_stages": 3}
    assert torch.equal(one, result("sliced", sliced, device, case))
    assert int((one != 0).sum()) > (spec.m - (m > 1)) * 1000


def test_fewer_rows_run_in_a_tile_of_more(device: Device) -> None:
    case = made("a8w8_blockscale", device, 3, 1280, 4096)
    few = result("streamed", tile_of(case[1], (16, 8, 2)), device, case)
    assert torch.equal(result("streamed", tile_of(case[1], (16, 8, 2), rows=8), device, case), few)


def test_strided_operands_of_a_graph_give_the_same_bits_again(device: Device) -> None:
    """Rows of x and of w further apart than they are long; a thousand replays over NaN."""
    family, spec, weights, inputs = made("a8w8_blockscale", device, 2, 1280, 2048)
    apart = [torch.empty(of.shape[0], of.shape[1] + 256, device=of.device).to(of.dtype) for of in (inputs.x, weights.w)]
    x, w = (held[:, : spec.k] for held in apart)
    x.view(torch.uint8).copy_(inputs.x.view(torch.uint8))
    w.view(torch.uint8).copy_(weights.w.view(torch.uint8))
    case = family, spec, Weights(w=w, w_scale=weights.w_scale), Inputs(x=x, x_scale=inputs.x_scale)
    kernel, out = kernel_of(case, "streamed"), torch.empty(spec.out_shape, dtype=torch.bfloat16, device=x.device)
    knobs = kernel.normalise(spec, tile_of(spec, (16, 8, 2)), device)
    launch = kernel.bind(spec, knobs, device, case[3], kernel.prepare(spec, case[2], knobs), out)
    first = launch().clone()
    assert_right(first, case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(1000):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)
