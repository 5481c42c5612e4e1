"""Bound Triton calls on a GPU: correct, in graphs, compiled, on any stream, and cheap on the host."""

import json
from collections.abc import Callable

import pytest
import torch

from gemmpipe.core.data import Scalar
from gemmpipe.core.device import gpu_device
from gemmpipe.family import Family, GemmSpec, Inputs, KernelDefaults, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.runtime import gemm_a8w8_blockscale, linear_fp8, prepare_weight, reload
from gemmpipe.runtime.dispatch import dispatch_of
from gemmpipe.runtime.weight_cache import WEIGHT_CACHE
from gemmpipe.tables.store import render

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
N, K = 1280, 8192
TILES = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
    "cache_modifier": "",
}
Case = tuple[Family, GemmSpec, Weights, Inputs]


@pytest.fixture
def tuned(tmp_path, monkeypatch) -> Callable[..., None]:
    def write(libtype: str, knobs: dict[str, Scalar], *ms: int) -> None:
        device, family = gpu_device(0), load_family("a8w8_blockscale")
        fp8 = family.key_defaults(KernelDefaults(dtype=None, out_dtype=None, bias=None), device.gfx)["dtype"]
        rows = [
            {"gfx": device.gfx, "cu_num": device.cu_num, "M": m, "N": N, "K": K, "dtype": fp8, "outdtype": "bfloat16"}
            | {"libtype": libtype, "config": json.dumps(knobs), "us": 1.0}
            for m in ms
        ]
        path = tmp_path / "table.csv"
        path.write_text(render(rows, family, ()))
        monkeypatch.setenv("GEMMPIPE_CONFIG_A8W8_BLOCKSCALE", str(path))
        reload()

    return write


def case(m: int, index: int = 0) -> Case:
    family, device = load_family("a8w8_blockscale"), gpu_device(index)
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": m, "N": N, "K": K}, defaults, device.gfx, "case"))
    generator = torch.Generator(device=device.torch_name).manual_seed(3)
    return family, spec, family.make_weights(spec, generator), family.make_inputs(spec, generator)


def call(made: Case) -> torch.Tensor:
    _, _, weights, inputs = made
    return gemm_a8w8_blockscale(inputs.x, weights.w, inputs.x_scale, weights.w_scale)


def right(out: torch.Tensor, made: Case) -> None:
    family, spec, weights, inputs = made
    assert error_ratio(out, family.reference(spec, inputs, weights), *family.tolerance(spec)) < 0.01


class Layer(torch.nn.Module):
    """Holds a weight as engines do: its address is constant for graphs."""

    def __init__(self, w: torch.Tensor, w_scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("w", w)
        self.register_buffer("w_scale", w_scale)

    def forward(self, x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        return gemm_a8w8_blockscale(x, self.w, x_scale, self.w_scale)


def test_untuned_rows_fall_back_to_a_library_on_padded_ones() -> None:
    reload()
    for m in (1, 13, 16):
        made = case(m)
        right(call(made), made)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("m", [1, 13, 16])
def test_a_triton_row_is_bound_once_and_right(tuned, m: int, splits: int) -> None:
    tuned("triton", {**TILES, "NUM_KSPLIT": splits}, 16)
    made = case(m)
    for _ in range(3):
        right(call(made), made)
    bound = list(dispatch_of("a8w8_blockscale").calls.values())
    assert [found.__module__ for found in bound] == ["gemmpipe.runtime.binding"]
    shifted = torch.empty(m * K + 3, dtype=made[3].x.dtype, device="cuda")[3:].view(m, K).copy_(made[3].x)
    _, _, weights, inputs = made
    right(gemm_a8w8_blockscale(shifted, weights.w, inputs.x_scale, weights.w_scale), made)
    m_major = inputs.x_scale.t().contiguous().t()
    right(gemm_a8w8_blockscale(inputs.x, weights.w, m_major, weights.w_scale), made)


@pytest.mark.parametrize(
    ("libtype", "knobs"),
    [
        ("triton", {**TILES, "NUM_KSPLIT": 1}),
        ("triton", {**TILES, "NUM_KSPLIT": 4}),
        ("scaled_mm", {"use_fast_accum": False}),
        ("torch", {"method": "bfloat16_copy"}),
    ],
)
def test_in_a_cuda_graph_and_in_a_compiled_one(tuned, libtype: str, knobs: dict[str, Scalar]) -> None:
    if libtype == "scaled_mm" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("block scales are sm_90's there")
    tuned(libtype, knobs, 16)
    made = case(16)
    expected = call(made).clone()
    right(expected, made)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = call(made)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)
    _, _, weights, inputs = made
    torch.compiler.reset()  # else what an earlier case warmed up is recorded without a warm-up of this one
    layer = Layer(weights.w.clone(), weights.w_scale)  # first seen while the compiled graph warms up
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            # A weight that cannot be prepared inside the graph has the fallback: correct, but not bitwise equal.
            right(compiled(inputs.x, inputs.x_scale), made)
    if knobs.get("NUM_KSPLIT", 1) != 1:
        with torch.no_grad(), torch.profiler.profile() as profile:
            compiled(inputs.x, inputs.x_scale)
            torch.cuda.synchronize()
        kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert not any("fill" in name.lower() or "memset" in name.lower() for name in kernels), kernels
    assert torch.equal(call(made), expected)


def test_a_graph_has_one_workspace_of_its_own(tuned) -> None:
    """Zeroed once per graph and not shared: graphs and eager calls run at the same time."""
    tuned("triton", {**TILES, "NUM_KSPLIT": 4}, 16)
    cases = [case(16), case(16)]
    cases[1][3].x.view(torch.uint8).copy_(cases[0][3].x.view(torch.uint8).flip(0))
    expected = [call(made).clone() for made in cases]
    graphs, outputs = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph(keep_graph=True))
        torch.cuda.synchronize()
        with torch.cuda.graph(graphs[-1]):
            outputs.append([call(made) for made in cases for _ in range(8)])
        graphs[-1].instantiate()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = [call(made) for made in cases]
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(eager, expected, strict=True))
        for found in outputs:
            assert all(torch.equal(out, expected[i // 8]) for i, out in enumerate(found))
    with torch.profiler.profile() as profile:
        graphs[0].replay()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("blockscale" in name for name in kernels) == 16
    assert len(kernels) <= 17, "one zeroing at most"


def test_a_weight_first_seen_in_a_capture_is_not_prepared(tuned, caplog) -> None:
    tuned("torch", {"method": "bfloat16_copy"}, 16)
    made = case(16)
    right(call(made), made)
    held = len(WEIGHT_CACHE.entries)
    other = case(16)
    other[2].w.view(torch.uint8).copy_(made[2].w.view(torch.uint8).flip(0))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = call(other)
    graph.replay()
    torch.cuda.synchronize()
    right(captured, other)
    assert len(WEIGHT_CACHE.entries) == held
    assert "captured in a graph before its weights were prepared" in caplog.text
    assert prepare_weight(other[2].w, other[2].w_scale) == 1


def test_on_another_stream_and_another_device(tuned) -> None:
    tuned("triton", {**TILES, "NUM_KSPLIT": 4}, 16)
    made = case(16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = call(made)
    stream.synchronize()
    right(out, made)
    if torch.cuda.device_count() > 1:
        second = case(16, 1)
        for _ in range(2):
            right(call(second), second)
            right(call(made), made)
        assert torch.cuda.current_device() == 0


def test_a_launch_that_cannot_be_is_skipped(tuned, caplog, monkeypatch) -> None:
    tuned("triton", {**TILES, "NUM_KSPLIT": 1}, 16)

    def fail(*operands: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr("gemmpipe.runtime.binding.load_build", fail)
    made = case(16)
    right(call(made), made)
    assert "failed and is skipped: RuntimeError: out of resource" in caplog.text


@pytest.mark.parametrize("m", [1, 16, 300])
def test_a_bias_of_a_linear_layer_by_blocks_is_added_once(m: int) -> None:
    """Its kernels have none; at once and in a graph."""
    reload()
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(m, 4096, generator=generator, device="cuda").bfloat16()
    w = torch.randn(1280, 4096, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(10, 32, generator=generator, device="cuda") / 64
    bias = (100 * torch.randn(1280, generator=generator, device="cuda")).bfloat16()
    expected = linear_fp8(x, w, scale).float() + bias.float()
    torch.testing.assert_close(linear_fp8(x, w, scale, bias).float(), expected, rtol=0.02, atol=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear_fp8(x, w, scale, bias)
    out.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.1)
