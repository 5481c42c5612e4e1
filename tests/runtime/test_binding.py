"""A kernel bound once, with a mocked launcher: its arguments, call by call."""

import json
from collections.abc import Callable, Iterator
from ctypes import c_float
from dataclasses import dataclass, field, replace

import pytest
import torch

from gemmpipe.core.data import Build, Candidate, Device
from gemmpipe.core.device import arch_device
from gemmpipe.core.spec import scale_order
from gemmpipe.family import Family, GemmSpec, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch.build import LoadedKernel
from gemmpipe.runtime.binding import bind_kernel, generic_call
from gemmpipe.runtime.operands import CallOperands
from gemmpipe.runtime.select import RunnableCandidate
from gemmpipe.templates.hopper.constraints import views_of_parts

TILES = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_warps": 4, "num_stages": 2}


@dataclass
class Kernel:
    """Replaces a compiled kernel and keeps the arguments of its launches."""

    launches: list[tuple[object, ...]] = field(default_factory=list)
    function, packed_metadata = "function", (4, 1, 1000)

    inspect: Callable[[dict[str, object]], None] | None = None
    """Called with the kernel's arguments while they are alive."""
    build: Build | None = None

    def run(self, *arguments: object) -> None:
        self.launches.append(arguments)
        if self.inspect is not None and self.build is not None:
            self.inspect(dict(zip((name for name, _ in self.build.signature), arguments[9:], strict=True)))


class _Driver:
    @staticmethod
    def get_current_stream(device: int) -> int:
        return 7

    @staticmethod
    def get_current_device() -> int:
        return 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    from triton.runtime import driver

    made = Kernel()

    def load(build: Build, device: Device) -> LoadedKernel:
        return LoadedKernel(build=build, kernel=made, interpreted=False)

    for module in ("gemmpipe.runtime.binding", "gemmpipe.launch.launch"):
        monkeypatch.setattr(f"{module}.load_build", load)
    monkeypatch.setattr("gemmpipe.runtime.binding.stream_getter", lambda: lambda index: 7)
    monkeypatch.setattr("gemmpipe.runtime.binding.device_context", lambda device: torch.no_grad())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(driver, "_active", _Driver())
    return made


def made(
    name: str, m: int, knobs: dict[str, object], label: str = "triton", **key: object
) -> tuple[CallOperands, GemmSpec, RunnableCandidate, Device]:
    family: Family = load_family(name)
    device = arch_device("sm_90")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": m, "N": 256, "K": 512, **key}, defaults, device.gfx, "case"))
    generator = torch.Generator().manual_seed(1)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    (implementation,) = (i for i in family.implementations if i.label == label)
    knobs = dict(implementation.normalise(spec, {**TILES, **knobs}, device))
    given = CallOperands(
        x=inputs.x,
        w=weights.w,
        x_scale=inputs.x_scale,
        w_scale=weights.w_scale,
        bias=weights.bias,
        out_dtype=torch.bfloat16,
    )
    return given, spec, RunnableCandidate(implementation=implementation, candidate=Candidate.of(label, knobs)), device


def build_of(chosen: RunnableCandidate, spec: GemmSpec, device: Device, scale: torch.Tensor | None) -> Build:
    """The build for scales in this order."""
    if spec.x_scale is not None and scale is not None and scale.dim() == 2:
        spec = replace(spec, x_scale=replace(spec.x_scale, order=scale_order(scale)))
    (build,) = chosen.implementation.builds(spec, chosen.candidate.knobs, device)
    return build


def arguments(
    kernel: Kernel, chosen: RunnableCandidate, spec: GemmSpec, device: Device, scale: torch.Tensor | None = None
) -> tuple[tuple[object, ...], dict]:
    """(grid, stream, what is launched and how; parameter -> value) of the last launch, tensors by their addresses."""
    build = build_of(chosen, spec, device, scale)
    *head, _, _, _ = kernel.launches[-1][:9]
    values = dict(zip((name for name, _ in build.signature), kernel.launches[-1][9:], strict=True))
    return tuple(head), {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


@pytest.mark.parametrize(
    "name", ["a16w16", "a16w16_atomic", "a8w8", "a8w8_blockscale", "a8w8_blockscale_bpreshuffle", "a4w4_blockscale"]
)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("m", [1, 32])
def test_it_launches_what_binding_each_time_would(kernel: Kernel, name: str, splits: int, m: int) -> None:
    given, spec, chosen, device = made(name, m, {"NUM_KSPLIT": splits})
    call = bind_kernel(chosen, spec, device, given, graph_pool=False)
    assert call is not None
    if name.endswith("scale_bpreshuffle"):
        given = replace(given, x_scale=aligned_as(given.x_scale, m_major=True))
    out = call(given.x, given.w, given.x_scale, given.w_scale, None)
    assert out.shape == (m, 256)
    head, bound = arguments(kernel, chosen, spec, device, given.x_scale)
    generic_call(chosen, spec, device, torch.bfloat16)(given.x, given.w, given.x_scale, given.w_scale, None)
    head_each_time, each_time = arguments(kernel, chosen, spec, device, given.x_scale)
    assert head == head_each_time
    assert bound.pop("out_ptr") == out.data_ptr()
    each_time.pop("out_ptr")
    assert bound == each_time, json.dumps([str(bound), str(each_time)])
    assert bound["x_ptr"] == given.x.data_ptr()


@pytest.mark.parametrize("name", ["a16w16", "a8w8", "a8w8_blockscale"])
@pytest.mark.parametrize(("splits", "columns"), [(4, 64), (2, 64), (1, 64), (2, 160)])
def test_it_launches_clusters_as_they_were_timed(kernel: Kernel, name: str, splits: int, columns: int) -> None:
    if columns == 160 and not views_of_parts():
        pytest.skip("this Triton views whole buffers of shared memory only")
    """The splits of a tile are launched as one cluster: otherwise they would reduce sums that are not ready."""
    deep = {"BLOCK_SIZE_K": 64 if name == "a16w16" else 128, "num_stages": 4, "GROUP_SIZE_M": 8, "num_warps": None}
    tile = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": columns, "NUM_KSPLIT": splits, "CLUSTER_SIZE": max(2, splits)}
    knobs = {**deep, **tile, "kernel_type": "warp_specialised"}
    given, spec, chosen, device = made(name, 256, knobs, "gluon", N=320, K=2048)
    assert chosen.implementation.unsupported_reason(spec, chosen.candidate.knobs, device) is None
    call = bind_kernel(chosen, spec, device, given, graph_pool=False)
    assert call is not None
    call(given.x, given.w, given.x_scale, given.w_scale, None)
    head, _ = arguments(kernel, chosen, spec, device, given.x_scale)
    generic_call(chosen, spec, device, torch.bfloat16)(given.x, given.w, given.x_scale, given.w_scale, None)
    head_each_time, _ = arguments(kernel, chosen, spec, device, given.x_scale)
    assert head == head_each_time
    assert head[-1] == (4, max(2, splits), 1000)


def aligned_as(scale: torch.Tensor | None, *, m_major: bool) -> torch.Tensor | None:
    return scale.mT.contiguous().mT if scale is not None and m_major else scale


GLUON = {"kernel_type": "warp_specialised", "BLOCK_SIZE_N": 128, "GROUP_SIZE_M": 1, "BLOCK_SIZE_M": 64}


def address(value: object) -> object:
    return value.base.data_ptr() if hasattr(value, "base") else value


def padded(scale: torch.Tensor) -> torch.Tensor:
    """Column-major with a gap after each column."""
    rows, blocks = scale.shape
    held = torch.full((blocks, -(-rows // 4) * 4 + 4), float("nan"))
    return held[:, :rows].copy_(scale.mT).mT


@pytest.mark.parametrize("name", ["a8w8_blockscale", "a8w8_blockscale_bpreshuffle"])
@pytest.mark.parametrize("label", ["triton", "gluon"])
@pytest.mark.parametrize("m", [32, 33])
@pytest.mark.parametrize("first", [False, True])
def test_block_scales_of_either_order_are_read_where_they_lie(
    kernel: Kernel, name: str, label: str, m: int, first: bool
) -> None:
    """For any strides at the first bind: the kernel is bound for each strides, and no scales are copied."""
    given, spec, chosen, device = made(name, m, GLUON if label == "gluon" else {}, label)
    assert chosen.implementation.unsupported_reason(spec, chosen.candidate.knobs, device) is None
    assert given.x_scale is not None
    rows, columns = aligned_as(given.x_scale, m_major=False), aligned_as(given.x_scale, m_major=True)
    call = bind_kernel(chosen, spec, device, replace(given, x_scale=columns if first else rows), graph_pool=False)
    for scale in (rows, columns, padded(rows), rows, columns):
        call(given.x, given.w, scale, given.w_scale, None)
        values = kernel.launches[-1][9:]
        assert scale.data_ptr() in [address(value) for value in values], scale.stride()
        generic_call(chosen, spec, device, torch.bfloat16)(given.x, given.w, scale, given.w_scale, None)
        each_time = kernel.launches[-1][9:]
        assert len(values) == len(each_time), "another build"
        numbers = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v < 2**31]
        assert numbers == [v for v in each_time if isinstance(v, int) and not isinstance(v, bool) and v < 2**31]


def test_scales_in_neither_order_and_at_odd_addresses_are_copied(kernel: Kernel) -> None:
    given, spec, chosen, device = made("a8w8_blockscale", 32, {})
    call = bind_kernel(chosen, spec, device, given, graph_pool=False)
    kernel.build = build_of(chosen, spec, device, given.x_scale)
    seen: list[torch.Tensor] = []
    kernel.inspect = lambda values: seen.append(
        torch.frombuffer((c_float * (4 * 32)).from_address(values["x_scale_ptr"]), dtype=torch.float32).clone()
    )
    assert given.x_scale is not None
    odd = torch.zeros(32 * 4 + 1)[1:].view(32, 4).copy_(given.x_scale)
    irregular = torch.zeros(64, 8)[::2, ::2].copy_(given.x_scale)
    for scale in (odd, irregular, odd, irregular):
        call(given.x, given.w, scale, given.w_scale, None)
        assert torch.equal(seen[-1], given.x_scale.flatten())


@pytest.mark.parametrize("m_major", [False, True])
def test_descriptors_are_made_once_an_address(kernel: Kernel, m_major: bool) -> None:
    given, spec, chosen, device = made("a8w8_blockscale", 64, GLUON, "gluon")
    call = bind_kernel(chosen, spec, device, given, graph_pool=False)
    given = replace(given, x_scale=aligned_as(given.x_scale, m_major=m_major))
    out = call(given.x, given.w, given.x_scale, given.w_scale, None)
    first = arguments(kernel, chosen, spec, device, given.x_scale)[1]
    call(given.x, given.w, given.x_scale, given.w_scale, None)
    second = arguments(kernel, chosen, spec, device, given.x_scale)[1]
    assert first["w"] is second["w"]
    generic_call(chosen, spec, device, torch.bfloat16)(given.x, given.w, given.x_scale, given.w_scale, None)
    each_time = arguments(kernel, chosen, spec, device, given.x_scale)[1]
    for name, value in each_time.items():
        if not hasattr(value, "base"):
            assert first[name] == value
            continue
        assert (first[name].shape, first[name].strides) == (value.shape, value.strides)
        assert first[name].layout == value.layout
    assert first["out"].base.data_ptr() == out.data_ptr()
    assert first["x"].base.data_ptr() == given.x.data_ptr()
    assert address(first["scales"]) == given.x_scale.data_ptr()
    assert not isinstance(first["x"].base, torch.Tensor), "a descriptor keeps no operand alive"


def test_atomics_add_to_zeros(kernel: Kernel) -> None:
    given, spec, chosen, device = made("a16w16_atomic", 32, {"NUM_KSPLIT": 2})
    call = bind_kernel(chosen, spec, device, given, graph_pool=False)
    assert not call(given.x, given.w, None, None, None).any()


def test_one_tensor_for_two_operands_is_bound_each_time(kernel: Kernel) -> None:
    given, spec, chosen, device = made("a16w16", 256, {})
    square = replace(given, x=given.w)
    assert bind_kernel(chosen, spec, device, square, graph_pool=False) is None


def test_a_bias_of_another_type_is_converted_in_each_call(kernel: Kernel) -> None:
    given, spec, chosen, device = made("a16w16", 32, {}, bias=True)
    call = bind_kernel(chosen, spec, device, given, graph_pool=False)
    call(given.x, given.w, None, None, given.bias)
    assert arguments(kernel, chosen, spec, device)[1]["bias_ptr"] == given.bias.data_ptr()
    assert bind_kernel(chosen, spec, device, replace(given, bias=given.bias.float()), graph_pool=False) is None


def test_the_launcher_of_a_known_triton_is_called_without_its_python_part(kernel: Kernel, monkeypatch) -> None:
    class CudaLauncher:
        """triton 3.6's wrapper of its compiled launcher."""

        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid, launch_pdl = False, True

        def launch(self, *arguments: object) -> None:
            kernel.launches.append(arguments)

        def __call__(self, x: int, y: int, z: int, stream: int, function: str, *arguments: object) -> None:
            flags = self.launch_cooperative_grid, self.launch_pdl
            self.launch(x, y, z, stream, function, *flags, None, None, *arguments)

    given, spec, chosen, device = made("a16w16", 32, {"NUM_KSPLIT": 2})
    kernel.run = CudaLauncher()
    for version in ("3.6.0", "3.9.0"):
        monkeypatch.setattr("triton.__version__", version)
        bind_kernel(chosen, spec, device, given, graph_pool=False)(given.x, given.w, None, None, None)
    direct, through_python = kernel.launches
    (build,) = chosen.implementation.builds(spec, chosen.candidate.knobs, device)
    out_at = 13 + [name for name, _ in build.signature].index("out_ptr")
    without_out = [[*found[:out_at], *found[out_at + 1 :]] for found in (direct, through_python)]
    assert without_out[0] == without_out[1]
    assert not direct[6], "a product alone overlaps the previous kernel"


def test_other_operands_of_the_key_go_where_they_lie(kernel: Kernel) -> None:
    given, spec, chosen, device = made("a16w16", 32, {})
    call = bind_kernel(chosen, spec, device, given, graph_pool=True)
    other = given.x.clone()
    call(other.view(2, 16, 512), given.w, None, None, None)
    assert arguments(kernel, chosen, spec, device)[1]["x_ptr"] == other.data_ptr()


@pytest.mark.parametrize("offset", [1, 4])
def test_addresses_and_strides_that_the_kernel_was_not_compiled_for_are_copied(kernel: Kernel, offset: int) -> None:
    given, spec, chosen, device = made("a16w16", 32, {})
    call = bind_kernel(chosen, spec, device, given, graph_pool=True)
    shifted = torch.zeros(32 * 512 + offset, dtype=torch.bfloat16)[offset:].view(32, 512)
    strided = torch.zeros(32, 520, dtype=torch.bfloat16)[:, :512]
    weight = torch.zeros(512, 256, dtype=torch.bfloat16).t()
    for x, w in ((shifted, given.w), (strided, given.w), (given.x, weight)):
        call(x, w, None, None, None)
        values = arguments(kernel, chosen, spec, device)[1]
        assert values["x_ptr"] % 16 == values["w_ptr"] % 16 == 0
        assert (values["x_stride"], values["w_stride"]) == (512, 512)
        assert (values["x_ptr"] == x.data_ptr()) == (x is given.x)
        assert (values["w_ptr"] == w.data_ptr()) == (w is given.w)


@pytest.mark.parametrize("name", ["a16w16_atomic", "a8w8_blockscale"])
def test_a_given_output_is_what_the_kernel_writes_into(kernel: Kernel, name: str) -> None:
    given, spec, chosen, device = made(name, 16, {"NUM_KSPLIT": 2})
    y = torch.full((16, 256), float("nan"), dtype=torch.bfloat16)
    call = bind_kernel(chosen, spec, device, given, graph_pool=False, make_out=lambda: y)
    assert call is not None
    assert call(given.x, given.w, given.x_scale, given.w_scale, None) is y
    assert len(kernel.launches) == 1  # nothing is copied
    _, values = arguments(kernel, chosen, spec, device, given.x_scale)
    assert values["out_ptr"] == y.data_ptr()
    assert name != "a16w16_atomic" or not y.any()  # splits are added to zeros
