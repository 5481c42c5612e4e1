"""x_scale in either memory order on a GPU, read in place by every kernel of the block-scaled families."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from gemmpipe.core.data import Device, Scalar
from gemmpipe.core.device import DeviceChoice
from gemmpipe.family import Family, GemmSpec, Inputs, KernelDefaults, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.launch.launch import KernelImplementation
from gemmpipe.templates.hopper.constraints import PersistentGrid

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LAYOUTS = ("rows", "columns", "padded", "padded_rows")
FAMILIES = ("a8w8_blockscale", "a8w8_blockscale_bpreshuffle")
Made = tuple[Family, GemmSpec, Weights, Inputs]


@pytest.fixture(scope="module")
def device() -> Device:
    return DeviceChoice(kind="auto", index=0, shared=False).find()[0]


def made(name: str, device: Device, m: int, n: int, k: int) -> Made:
    family, options = load_family(name), KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": m, "N": n, "K": k}, options, device.gfx, "test"))
    generator = torch.Generator(device=device.torch_name).manual_seed(13)
    return family, spec, family.make_weights(spec, generator), family.make_inputs(spec, generator)


def laid(scales: torch.Tensor, how: str) -> torch.Tensor:
    """The same scales in memory as rows or columns, with NaN in the gaps of padded ones."""
    rows, blocks = scales.shape
    strides = {
        "rows": (blocks, 1),
        "columns": (1, rows),
        "padded": (1, -(-rows // 4) * 4),
        "padded_rows": (-(-blocks // 4) * 4 + 4, 1),
    }[how]
    length = (rows - 1) * strides[0] + (blocks - 1) * strides[1] + 1
    held = torch.full((length,), float("nan"), device=scales.device)
    return held.as_strided((rows, blocks), strides).copy_(scales)


def kernel_of(case: Made, label: str) -> KernelImplementation:
    kernel = next(i for i in case[0].implementations if i.label == label)
    assert isinstance(kernel, KernelImplementation)
    return kernel


def check(kernel: KernelImplementation, knobs: Mapping[str, Scalar], device: Device, case: Made) -> None:
    """Every layout gives the same right bits, over NaN, in a graph too, and after the operands have changed."""
    family, spec, weights, inputs = case
    knobs = kernel.normalise(spec, knobs, device)
    reason = kernel.unsupported_reason(spec, knobs, device)
    if reason is not None and "do not share clusters" in reason:
        pytest.skip(reason)
    assert reason is None
    prepared, expected = kernel.prepare(spec, weights, knobs), None
    reference, tolerance = family.reference(spec, inputs, weights), family.tolerance(spec)
    for how in LAYOUTS:
        assert inputs.x_scale is not None
        own = replace(inputs, x=inputs.x.clone(), x_scale=laid(inputs.x_scale, how))
        out = torch.full(spec.out_shape, float("nan"), dtype=torch.bfloat16, device=device.torch_name)
        launch = kernel.bind(spec, knobs, device, own, prepared, out)
        first = launch().clone()
        assert error_ratio(first, reference, *tolerance) < 0.01, how
        expected = first if expected is None else expected
        assert torch.equal(first, expected), how
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
            launch()
        assert own.x_scale is not None
        own.x_scale.mul_(2)  # exact
        out.fill_(float("nan"))
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.float(), first.float() * 2), how


def gluon(m: int, n: int, stages: int, splits: int = 1, **more: Scalar) -> dict[str, Scalar]:
    sides = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 8, "NUM_KSPLIT": splits}
    return {"kernel_type": "warp_specialised", **sides, "num_stages": stages, **more}


TILES = [
    *[gluon(64, 64, 6), gluon(64, 128, 6), gluon(128, 128, 5), gluon(128, 80, 6), gluon(128, 96, 5)],
    *[gluon(128, 160, 5), gluon(128, 192, 4), gluon(64, 64, 8, 3), gluon(128, 128, 4, 2), gluon(64, 64, 6, 5)],
    *[gluon(64, 64, 6, 4, CLUSTER_SIZE=4), gluon(128, 128, 4, 3, CLUSTER_SIZE=3)],
    *[gluon(128, 160, 4, 2, CLUSTER_SIZE=2), gluon(64, 64, 6, CTAS_PER_SM=2), gluon(64, 64, 6, 4, CTAS_PER_SM=2)],
]


ONE_WARPGROUP = [
    *[
        gluon(64, n, stages, ONE_WARPGROUP=True)
        for n, stages in ((16, 8), (32, 12), (48, 10), (64, 8), (80, 8), (96, 7))
    ],
    *[gluon(64, 128, 6, ONE_WARPGROUP=True), gluon(64, 128, 4, 2, CLUSTER_SIZE=2, ONE_WARPGROUP=True)],
    *[gluon(64, 64, 8, 3, ONE_WARPGROUP=True), gluon(64, 64, 6, 4, CLUSTER_SIZE=4, ONE_WARPGROUP=True)],
    *[gluon(64, 48, 6, 3, ONE_WARPGROUP=True), gluon(64, 96, 6, 4, CLUSTER_SIZE=4, ONE_WARPGROUP=True)],
    *[gluon(64, n, 6, CTAS_PER_SM=2, ONE_WARPGROUP=True) for n in (32, 48, 64)],
    gluon(64, 64, 6, 4, CTAS_PER_SM=2, ONE_WARPGROUP=True),
    *[
        gluon(64, n, stages, ONE_WARPGROUP=True, OWN_PACE=True)
        for n, stages in ((32, 12), (48, 10), (64, 8), (80, 8), (96, 7), (128, 8))
    ],
    gluon(64, 64, 8, ONE_WARPGROUP=True, OWN_PACE=True, CONSTANT_NK=True),
    *[gluon(64, n, 6, CTAS_PER_SM=2, ONE_WARPGROUP=True, OWN_PACE=True) for n in (32, 48, 64)],
    *[gluon(64, 64, 8, 3, ONE_WARPGROUP=True, OWN_PACE=True), gluon(64, 96, 7, 2, ONE_WARPGROUP=True, OWN_PACE=True)],
    gluon(64, 64, 8, 4, CLUSTER_SIZE=4, ONE_WARPGROUP=True, OWN_PACE=True),
    gluon(64, 96, 6, 4, CLUSTER_SIZE=4, ONE_WARPGROUP=True, OWN_PACE=True),
    *[
        gluon(64, n, stages, splits, ONE_WARPGROUP=True, OWN_PACE=True, EARLY_COPIES=True, **more)
        for n, stages, splits, more in (
            *((32, 12, 1, {}), (64, 13, 1, {}), (80, 11, 1, {}), (96, 10, 2, {}), (128, 8, 1, {})),
            *((64, 6, 1, {"CTAS_PER_SM": 2}), (64, 8, 4, {"CLUSTER_SIZE": 4}), (64, 8, 3, {})),
        )
    ],
]


@pytest.mark.parametrize(
    "knobs", [*TILES, *ONE_WARPGROUP], ids=lambda k: "-".join(str(v) for v in list(k.values())[1:])
)
@pytest.mark.parametrize("m", [1, 3, 5, 64, 100, 127, 4096])
@pytest.mark.parametrize(("n", "k"), [(1280, 8192), (1320, 1040), (520, 128), (2112, 7168)])
def test_warp_specialised(device: Device, m: int, n: int, k: int, knobs: Mapping[str, Scalar]) -> None:
    """K blocks: 64 in fours; nine, the last of them partial; one; 56."""
    if device.gfx != "sm_90":
        pytest.skip("Hopper's kernel")
    case = made("a8w8_blockscale", device, m, n, k)
    check(kernel_of(case, "gluon"), knobs, device, case)


WAVES = [
    *[gluon(256, 128, 4), gluon(256, 128, 3, CLUSTER_SIZE=2), gluon(256, 64, 5), gluon(256, 96, 4), gluon(256, 32, 5)],
    *[gluon(256, 112, 4), gluon(128, 128, 6, OWN_PACE=True), gluon(128, 96, 7, OWN_PACE=True)],
    *[gluon(128, 160, 5, OWN_PACE=True), gluon(128, 192, 4, OWN_PACE=True), gluon(256, 128, 4, CONSTANT_NK=True)],
    *[gluon(128, 144, 6, OWN_PACE=True), gluon(128, 192, 5, OWN_PACE=True), gluon(128, 112, 7, OWN_PACE=True)],
    *[gluon(128, 80, 8, OWN_PACE=True), gluon(128, 32, 10, OWN_PACE=True), gluon(128, 48, 8, OWN_PACE=True)],
    *[gluon(128, 160, 5, OWN_PACE=True, CONSTANT_NK=True), gluon(128, 128, 5, CONSTANT_NK=True)],
    gluon(128, 192, 4, OWN_PACE=True, CLUSTER_SIZE=2),
    *[
        gluon(128, columns, slots, OWN_PACE=True, TWO_IN_FLIGHT=True)
        for columns, slots in ((32, 10), (48, 8), (64, 8), (80, 8), (96, 7), (112, 6), (128, 5))
    ],
    gluon(128, 96, 7, OWN_PACE=True, TWO_IN_FLIGHT=True, CONSTANT_NK=True, CLUSTER_SIZE=2),
]


@pytest.mark.parametrize("knobs", WAVES, ids=lambda k: "-".join(str(v) for v in list(k.values())[1:]))
@pytest.mark.parametrize("m", [1, 3, 64, 100, 127, 129, 255, 256, 257, 259, 511, 1000, 4096])
@pytest.mark.parametrize(("n", "k"), [(1280, 8192), (1320, 1040), (520, 128), (2112, 7168), (520, 1008)])
def test_two_waves_and_own_pace(device: Device, m: int, n: int, k: int, knobs: Mapping[str, Scalar]) -> None:
    """K = 1008: eight K blocks, the last of them partial."""
    if device.gfx != "sm_90":
        pytest.skip("Hopper's kernel")
    if m < 256 == knobs["BLOCK_SIZE_M"]:
        pytest.skip("a tile of 256 rows needs as many")
    case = made("a8w8_blockscale", device, m, n, k)
    check(kernel_of(case, "gluon"), knobs, device, case)


@pytest.mark.parametrize("knobs", [gluon(256, 128, 3), gluon(256, 128, 4, CLUSTER_SIZE=2)], ids=str)
@pytest.mark.parametrize("m", [770, 1000, 1023, 1024])
@pytest.mark.parametrize("k", [128, 896, 1008, 2048])
def test_halves_of_tiles(device: Device, m: int, k: int, knobs: Mapping[str, Scalar]) -> None:
    """Tiles of 256 rows in the last round over the device."""
    if device.gfx != "sm_90":
        pytest.skip("Hopper's kernel")
    n = 128 * (device.cu_num // 4 + 3) - 8
    case = made("a8w8_blockscale", device, m, n, k)
    kernel = kernel_of(case, "gluon")
    _, spec, *_ = case
    assert PersistentGrid.of(spec, kernel.normalise(spec, knobs, device), device).halved
    check(kernel, knobs, device, case)


@pytest.mark.parametrize(
    "knobs",
    [gluon(64, 64, 6, 3), gluon(64, 64, 6, 4, CLUSTER_SIZE=4), gluon(128, 128, 4, 3), gluon(64, 192, 6)],
    ids=str,
)
@pytest.mark.parametrize("m", [1, 3, 64, 127])
@pytest.mark.parametrize(("n", "k"), [(1280, 8192), (1320, 1040)])
def test_constant_sizes(device: Device, m: int, n: int, k: int, knobs: Mapping[str, Scalar]) -> None:
    if device.gfx != "sm_90":
        pytest.skip("Hopper's kernel")
    case = made("a8w8_blockscale", device, m, n, k)
    check(kernel_of(case, "gluon"), {**knobs, "CONSTANT_NK": True}, device, case)


@pytest.mark.parametrize("knobs", [gluon(64, 64, 6), gluon(128, 128, 5), gluon(64, 128, 6, 3)], ids=str)
@pytest.mark.parametrize("m", [1, 3, 64, 127, 1000])
@pytest.mark.parametrize(("n", "k"), [(1280, 8192), (528, 1056)])
def test_warp_specialised_with_a_shuffled_weight(
    device: Device, m: int, n: int, k: int, knobs: Mapping[str, Scalar]
) -> None:
    if device.gfx != "sm_90":
        pytest.skip("Hopper's kernel")
    case = made("a8w8_blockscale_bpreshuffle", device, m, n, k)
    check(kernel_of(case, "gluon"), knobs, device, case)


def tile(m: int, n: int, k: int, splits: int, warps: int, stages: int, **more: Scalar) -> dict[str, Scalar]:
    sides = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 8, "NUM_KSPLIT": splits}
    return {**sides, "num_warps": warps, "num_stages": stages, "cache_modifier": "", **more}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("knobs", [tile(16, 64, 128, 4, 4, 3), tile(64, 128, 64, 1, 4, 3), tile(64, 64, 128, 3, 4, 4)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1280, 8192), (5, 1312, 1056), (127, 528, 2048), (1000, 1280, 512)])
def test_plain(device: Device, name: str, m: int, n: int, k: int, knobs: Mapping[str, Scalar]) -> None:
    case = made(name, device, m, n, k)
    for more in ({}, {"SWAP_AB": True}) if device.vendor == "nvidia" else ({},):
        check(kernel_of(case, "triton"), {**knobs, **more}, device, case)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1280, 8192), (3, 1312, 1056), (16, 528, 2048)])
def test_skinny(device: Device, name: str, m: int, n: int, k: int) -> None:
    case = made(name, device, m, n, k)
    check(kernel_of(case, "skinny"), tile(2, 8, 512, 1, 2, 2), device, case)


@pytest.mark.parametrize("knobs", [tile(8, 16, 1024, 1, 8, 3), tile(16, 8, 256, 1, 4, 4), tile(32, 16, 512, 1, 8, 4)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1280, 8192), (5, 1300, 1000), (33, 1030, 528)])
def test_sliced(device: Device, m: int, n: int, k: int, knobs: Mapping[str, Scalar]) -> None:
    if device.vendor != "nvidia":
        pytest.skip("NVIDIA's instructions")
    case = made("a8w8_blockscale", device, m, n, k)
    check(kernel_of(case, "sliced"), knobs, device, case)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1280, 8192), (3, 1296, 1024), (8, 544, 2048)])
def test_streamed(device: Device, m: int, n: int, k: int) -> None:
    if device.vendor != "nvidia":
        pytest.skip("NVIDIA's instructions")
    case = made("a8w8_blockscale", device, m, n, k)
    check(kernel_of(case, "streamed"), tile(1 << (m - 1).bit_length(), 16, 1024, 1, 8, 2), device, case)


def test_many_launches_of_different_operands(device: Device) -> None:
    """Would show a scale read before the previous kernel has written it, or a slot's former scale."""
    if device.gfx != "sm_90":
        pytest.skip("Hopper's kernel")
    case = family, spec, weights, inputs = made("a8w8_blockscale", device, 300, 7168, 2048)
    kernel, knobs = kernel_of(case, "gluon"), gluon(128, 128, 4)
    knobs, prepared = kernel.normalise(spec, knobs, device), kernel.prepare(spec, weights, knobs)
    assert inputs.x_scale is not None
    out = torch.empty(spec.out_shape, dtype=torch.bfloat16, device=device.torch_name)
    scales = torch.empty_like(inputs.x_scale)
    launch = kernel.bind(spec, knobs, device, replace(inputs, x_scale=scales), prepared, out)
    scales.copy_(inputs.x_scale)
    expected = launch().float()
    assert error_ratio(expected, family.reference(spec, inputs, weights), *family.tolerance(spec)) < 0.01
    for i in range(300):
        factor = 2.0 ** (i % 5 - 2)
        torch.mul(inputs.x_scale, factor, out=scales)  # the previous kernel
        out.fill_(float("nan"))
        torch.mul(inputs.x_scale, factor, out=scales)
        assert torch.equal(launch().float(), expected * factor), i


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("m", [1, 3, 16, 100, 512])
def test_a_call_is_one_kernel_in_either_order(device: Device, name: str, m: int) -> None:
    """The run-time function with a configuration of ours: nothing is copied. Without a row it may dequantise."""
    from torch.profiler import ProfilerActivity, profile

    from gemmpipe import runtime

    case = made(name, device, m, 1280, 8192)
    _, _, weights, inputs = case
    function = getattr(runtime, case[0].entry_point)
    assert inputs.x_scale is not None
    counts, config = {}, tile(16, 64, 128, 1, 4, 3)
    with torch.inference_mode():
        for how in LAYOUTS:
            scales = laid(inputs.x_scale, how)
            function(inputs.x, weights.w, scales, weights.w_scale, config=config)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                function(inputs.x, weights.w, scales, weights.w_scale, config=config)
                torch.cuda.synchronize()
            counts[how] = [event.name for event in seen.events() if event.device_type.name == "CUDA"]
    assert all(len(names) == 1 for names in counts.values()), counts
