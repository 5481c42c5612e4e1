"""The number of kernels per call: one per product unless designed otherwise; an unexpected copy fails.

Own kernels are counted where their launcher is called, libraries by torch's operators; those that need a GPU, or a
package that is not here, are replaced by a mock that counts its calls.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from moe_problems import routed_operands
from pairwise import pairwise
from torch.utils._python_dispatch import TorchDispatchMode

from gemmpipe.backends.aiter import Asm, Ck
from gemmpipe.backends.aten import Torch
from gemmpipe.backends.deepgemm import DeepGemm
from gemmpipe.backends.flashinfer import FlashInfer
from gemmpipe.backends.hipblaslt import HipblasLt, _library
from gemmpipe.backends.onednn import OneDnn
from gemmpipe.backends.quack import Quack
from gemmpipe.backends.quantised_library import QuantisedLibrary
from gemmpipe.backends.scaled_mm import ScaledMm
from gemmpipe.backends.vllm_cutlass import VllmCutlass
from gemmpipe.core.data import Build, Candidate, Device, Knobs, Scalar
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, KernelDefaults, Launch, Weights, load_family
from gemmpipe.family.operands import in_memory_order
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space
from gemmpipe.kernels.fmoe._triton import MultiLaunchImplementation
from gemmpipe.launch.build import LoadedKernel
from gemmpipe.launch.launch import KernelImplementation
from gemmpipe.runtime import moe
from gemmpipe.runtime.dispatch import Dispatch
from gemmpipe.runtime.operands import CallOperands
from gemmpipe.runtime.select import LookupResult, RunnableCandidate
from gemmpipe.templates.quantise import QuantisedFirst

SPACES = Path(__file__).parents[2] / "conf" / "space"
H200 = arch_device("sm_90")
SIZES: Mapping[str, Mapping[str, Scalar]] = {
    "fmoe": {"model_dim": 256, "inter_dim": 256, "expert": 8, "topk": 2, "act_type": "silu", "use_g1u1": 1},
}
PLAIN: Mapping[str, Scalar] = {"N": 512, "K": 1024, "B": 2}
ROWS = (1, 64, 256)
FREE = (
    "empty",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_like",
    "detach",
    "lift_fresh",
    "alias",
    "_unsafe_view",
)
"""Operators that launch nothing; nor does any view."""


@dataclass
class Counter(TorchDispatchMode):
    """The launches of a call, in order: our kernels as `kernel`, torch's operators by name."""

    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        kwargs = kwargs or {}
        if name == "_scaled_mm_v2":  # a GPU's
            self.seen.append(name)
            return kwargs["out"]
        if not func.is_view and name not in FREE:
            self.seen.append(name)
        return func(*args, **kwargs)

    def count(self, call: Callable[[], object]) -> list[str]:
        """The launches of `call`."""
        self.seen.clear()
        with self:
            call()
        return list(self.seen)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Our kernels count their launches instead of running."""
    from triton.runtime import driver

    made = Counter()
    kernel = SimpleNamespace(
        function="function", packed_metadata=(4, 1, 1000), run=lambda *arguments: made.seen.append("kernel")
    )

    def load(build: Build, device: Device) -> LoadedKernel:
        return LoadedKernel(build=build, kernel=kernel, interpreted=False)

    for module in (
        "gemmpipe.runtime.binding",
        "gemmpipe.runtime.mixture_binding",
        "gemmpipe.launch.launch",
        "gemmpipe.kernels.fmoe._triton",
        "gemmpipe.templates.quantise",
    ):
        monkeypatch.setattr(f"{module}.load_build", load)
    for module in ("binding", "mixture_binding"):
        monkeypatch.setattr(f"gemmpipe.runtime.{module}.stream_getter", lambda: lambda index: 7)
    for module in ("binding", "moe"):
        monkeypatch.setattr(f"gemmpipe.runtime.{module}.device_context", lambda device: torch.no_grad())
    monkeypatch.setattr("gemmpipe.runtime.binding._synchronized", lambda make, device: make())
    monkeypatch.setattr("gemmpipe.runtime.binding.is_capturing", lambda device: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(
        driver, "_active", SimpleNamespace(get_current_stream=lambda device: 7, get_current_device=lambda: 0)
    )
    return made


@lru_cache
def space_of(name: str) -> Space:
    axes = yaml.safe_load((SPACES / f"{name}.yaml").read_text())
    entries = axes.pop("when", [])
    listed = [{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()} for entry in entries]
    return Space(axes={k: tuple(v) for k, v in axes.items()}, when=tuple(listed), pinned=())


def spec_of(family: Family, m: int, gfx: str = "sm_90", **key: Scalar) -> GemmSpec:
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    values = {**SIZES.get(family.name, PLAIN), family.rows_column: m, **key}
    return family.spec(make_problem(family, values, defaults, gfx, "case"))


def fitting(implementation: Implementation, spec: GemmSpec, device: Device, space: Space) -> Iterator[Knobs]:
    """The first candidate that fits with one split of K, and the first with several, where there are such."""
    wanted = {True, False}
    for point in implementation.configs(spec, device, space):
        split = point.get("NUM_KSPLIT") not in (None, 1)
        if split in wanted:
            knobs = implementation.normalise(spec, point, device)
            if (knobs.get("NUM_KSPLIT") not in (None, 1)) == split and not implementation.unsupported_reason(
                spec, knobs, device
            ):
                wanted.discard(split)
                yield knobs
        if not wanted:
            return


def operands(family: Family, spec: GemmSpec, order: str) -> tuple[Inputs, Weights]:
    generator = torch.Generator().manual_seed(1)
    inputs, weights = family.make_inputs(spec, generator), family.make_weights(spec, generator)
    if inputs.x_scale is not None and spec.x_scale is not None and spec.x_scale.granularity == "block":
        inputs = Inputs(x=inputs.x, x_scale=in_memory_order(inputs.x_scale, order))
    return inputs, weights


def called(
    family: Family, spec: GemmSpec, device: Device, candidate: Candidate, inputs: Inputs, weights: Weights
) -> Callable[[], object]:
    """The call that the run time makes of a selected candidate."""
    implementation = next((i for i in family.implementations if i.label == candidate.backend), None)
    chosen = RunnableCandidate(implementation=implementation or LIBRARIES[candidate.backend], candidate=candidate)
    out_dtype = getattr(torch, spec.out_dtype)
    if spec.experts is not None:
        routed, given = moe._bind(chosen, spec, device), routed_operands(spec, inputs, weights)
        return lambda: routed(given)
    tensors = (inputs.x, weights.w, inputs.x_scale, weights.w_scale, weights.bias)
    x, w, x_scale, w_scale, bias = tensors
    product = CallOperands(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, out_dtype=out_dtype)
    selected = LookupResult(step="exact", source="test", runnable=chosen)
    call = Dispatch(family=family, graph_pool=False)._bind(selected, spec, device, product)
    return lambda: call(x, w, x_scale, w_scale, bias)


def designed(implementation: Implementation, spec: GemmSpec, knobs: Knobs, device: Device) -> list[str]:
    """One product is one kernel by design; atomics need a zeroed output first."""
    if isinstance(implementation, MultiLaunchImplementation):
        return ["kernel"] * len(implementation.launch_plan(spec, knobs, device))
    if isinstance(implementation, QuantisedFirst):
        return ["kernel", "kernel"]
    zeroed = "_atomic@" in implementation.kernel_name(knobs)
    return ["zero_", "kernel"] if zeroed else ["kernel"]


OWN = sorted(
    (path.parent.name, implementation.label)
    for path in (Path(__file__).parents[2] / "kernels").glob("*/__init__.py")
    for implementation in load_family(path.parent.name).implementations
)


@pytest.mark.parametrize(("name", "label", "m"), pairwise(OWN, ROWS, once=True))
def test_a_product_of_ours_is_one_kernel(counter: Counter, name: str, label: str, m: int) -> None:
    """For every layout with contiguous operands, in the run time's call and in the timed launch."""
    family = load_family(name)
    (implementation,) = (i for i in family.implementations if i.label == label)
    spec = spec_of(family, m)
    found = list(fitting(implementation, spec, H200, space_of(name)))
    if not found:
        pytest.skip(f"no candidate of {label} for M={m}")
    for knobs in found:
        for order in spec.x_scale_orders:
            inputs, weights = operands(family, spec, order)
            expected = designed(implementation, spec, knobs, H200)
            call = called(family, spec, H200, Candidate.of(label, knobs), inputs, weights)
            call()  # the first call may make what later ones reuse: workspace, forms of the weight
            assert counter.count(call) == expected, (order, knobs)
            out = torch.empty(spec.out_shape, dtype=getattr(torch, spec.out_dtype))
            prepared = implementation.prepare(spec, weights, knobs)
            launches: list[Launch] = []
            bind = counter.count(
                lambda: launches.append(implementation.bind(spec, knobs, H200, inputs, prepared, out))  # noqa: B023
            )
            assert bind == [], f"work outside what is timed: {order} {knobs}"
            assert counter.count(launches[0]) == expected, (order, knobs)


def test_every_own_kernel_is_tested() -> None:
    """For at least one number of rows each has a candidate, so that nothing above is skipped altogether."""
    for name, label in OWN:
        family = load_family(name)
        (implementation,) = (i for i in family.implementations if i.label == label)
        assert any(list(fitting(implementation, spec_of(family, m), H200, space_of(name))) for m in ROWS), (name, label)


@dataclass(frozen=True)
class Case:
    """A library's candidate, and its launches for row-major and M-major scales of x."""

    family: str
    backend: str
    knobs: Mapping[str, Scalar]
    row: tuple[str, ...]
    column: tuple[str, ...] = ()
    m: int = 64
    gfx: str = "sm_90"
    key: Mapping[str, Scalar] = field(default_factory=dict)


LIBRARIES: Mapping[str, Implementation] = {
    i.label: i
    for i in (
        *(Torch(), OneDnn(), ScaledMm(), DeepGemm(), Quack(), FlashInfer(), VllmCutlass(), QuantisedLibrary()),
        *(Ck(), Asm(), HipblasLt()),
    )
}
COPY = "copy_"
CPU = "cpu"
OWN_CHOICE: Knobs = {"kernelName": "", "NUM_KSPLIT": 0}
MOE_STAGES: Knobs = {"block_m": 32, "kernelName1": "", "kernelName2": "", "shuffled": False}
SHUFFLED = (COPY, "clone")
"""aiter's MXFP4 kernels read shuffled scales of x: padding, then the order of the tiles."""
CASES = [
    Case("a16w16", "torch", {"method": "mm"}, ("mm",)),
    Case("a16w16", "torch", {"method": "mm"}, ("addmm",), key={"bias": True}),
    Case("batched_bf16", "torch", {"method": "mm"}, ("bmm",)),
    Case("a16w16", "quack", {}, ("quack",)),
    Case("a16w16", "onednn", {"method": "bfloat16_packed"}, ("_linear_pointwise", COPY), gfx=CPU),
    Case("a8w8", "scaled_mm", {"use_fast_accum": False}, ("_scaled_mm_v2",), key={"q_dtype_w": "float8_e4m3fn"}),
    Case("a8w8_blockscale", "scaled_mm", {"use_fast_accum": False}, (COPY, "_scaled_mm_v2"), ("_scaled_mm_v2",)),
    Case("a8w8_blockscale", "deepgemm", {}, ("deepgemm",), ("deepgemm",)),
    Case("a8w8_blockscale", "ck", {"solidx": 3, "NUM_KSPLIT": 1}, ("ck",), (COPY, "ck"), gfx="gfx942"),
    Case("a8w8_blockscale_bpreshuffle", "ck", {"solidx": 3, "NUM_KSPLIT": 1}, (COPY, "ck"), ("ck",), gfx="gfx942"),
    Case("a8w8_blockscale", "flashinfer", {}, (COPY, "flashinfer"), ("flashinfer",)),
    Case("a8w8_blockscale", "vllm_cutlass", {}, (COPY, "cutlass"), ("cutlass",)),
    Case("a8w8", "vllm_cutlass", {}, ("cutlass",), key={"q_dtype_w": "float8_e4m3fn"}),
    Case("linear_fp8_blockscale", "quantised_library", {"use_fast_accum": False}, ("kernel", "_scaled_mm_v2")),
    Case("linear_fp8_row", "quantised_library", {"use_fast_accum": False}, ("kernel", "_scaled_mm_v2")),
    Case("a16w16", "hipblaslt", {"solidx": -1}, ("hipblaslt",), gfx="gfx942"),
    Case("a16w16", "hipblaslt", {"solidx": -1}, ("hipblaslt",), gfx="gfx942", key={"bpreshuffle": True}),
    Case("a16w16", "asm", OWN_CHOICE, ("asm",), gfx="gfx942"),
    Case("a16w16", "asm", OWN_CHOICE, ("asm",), gfx="gfx942", key={"bpreshuffle": True}),
    Case("a8w8_bpreshuffle", "asm", OWN_CHOICE, ("asm",), gfx="gfx942", key={"q_dtype_w": "int8"}),
    Case("a8w8_blockscale_bpreshuffle", "asm", OWN_CHOICE, (COPY, "asm"), ("asm",), gfx="gfx942"),
    Case("a4w4_blockscale", "asm", OWN_CHOICE, (*SHUFFLED, "asm"), gfx="gfx950"),
    Case("a4w4_blockscale", "ck", {"solidx": 3, "NUM_KSPLIT": 1}, (*SHUFFLED, "ck"), gfx="gfx950"),
    Case("a8w8", "ck", {"solidx": 3, "NUM_KSPLIT": 1}, ("ck",), gfx="gfx942", key={"q_dtype_w": "int8"}),
    Case("a8w8_bpreshuffle", "ck", {"solidx": 3, "NUM_KSPLIT": 1}, ("ck",), gfx="gfx942", key={"q_dtype_w": "int8"}),
    Case("batched_bf16", "ck", {"solidx": 3, "NUM_KSPLIT": 1}, ("ck",), gfx="gfx942"),
    Case("batched_a8w8", "ck", {"solidx": 3, "NUM_KSPLIT": 1}, ("ck",), gfx="gfx942", key={"dtype": "int8"}),
    Case("fmoe", "ck", MOE_STAGES, ("moe_sorting", "ck", "ck"), gfx="gfx942"),
]


@pytest.fixture
def packages(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mocks of packages that are not installed: each call is counted."""
    made: dict[str, Iterable[tuple[str, str]]] = {
        "deep_gemm": [("fp8_gemm_nt", "deepgemm")],
        "quack.gemm_interface": [("gemm", "quack")],
        "flashinfer.gemm": [("fp8_blockscale_gemm_sm90", "flashinfer")],
        "aiter": [
            *((f"gemm_{name}_tune", "ck") for name in ("a8w8", "a8w8_blockscale", "a8w8_bpreshuffle")),
            *((f"gemm_{name}_tune", "ck") for name in ("a8w8_blockscale_bpreshuffle", "a4w4_blockscale")),
            *((f"batched_gemm_{name}_tune", "ck") for name in ("bf16", "a8w8")),
            *((f"gemm_{name}_asm", "asm") for name in ("a16w16", "a8w8", "a8w8_blockscale_bpreshuffle", "a4w4")),
            *((f"ck_moe_stage{i}_fwd", "ck") for i in (1, 2)),
        ],
    }

    def counting(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: counter.seen.append(name)

    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    for module, functions in made.items():
        stand_in = ModuleType(module)
        for function, name in functions:
            setattr(stand_in, function, counting(name))
        monkeypatch.setitem(sys.modules, module, stand_in)
    package: Any = sys.modules["aiter"]
    package.hipb_create_extension = lambda: None
    package.QuantType, package.ActivationType = SimpleNamespace(No=0), SimpleNamespace(Silu=0)
    package.get_hip_quant = lambda kind: lambda x, **options: (x, None)

    def hipb_mm(x: torch.Tensor, w: torch.Tensor, *rest: object, **options: Any) -> torch.Tensor:
        counter.seen.append("hipblaslt")
        return torch.empty(x.shape[0], w.shape[1], dtype=options["out_dtype"])

    def sort(
        ids: torch.Tensor, shares: torch.Tensor, experts: int, columns: int, dtype: torch.dtype, *rest: object
    ) -> tuple[torch.Tensor, ...]:
        counter.seen.append("moe_sorting")
        return (*(torch.empty(1) for _ in range(4)), torch.empty(ids.shape[0], columns, dtype=dtype))

    package.hipb_mm = hipb_mm
    experts = ModuleType("aiter.fused_moe")
    experts.moe_sorting = sort  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter.fused_moe", experts)
    monkeypatch.setattr("gemmpipe.backends.vllm_cutlass.operator", lambda name: counting("cutlass"))
    _library.cache_clear()


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join((case.family, case.backend, *case.key)))
def test_a_product_of_a_library_is_what_is_timed(counter: Counter, case: Case) -> None:
    """A copy into the layout that a library requires is part of its launch, never done before it."""
    family, library = load_family(case.family), LIBRARIES[case.backend]
    device = cpu_device() if case.gfx == CPU else arch_device(case.gfx)
    spec = spec_of(family, case.m, device.gfx, **case.key)
    reason = library.unsupported_reason(spec, case.knobs, device)
    if reason is not None and case.gfx == CPU:
        pytest.skip(reason)
    assert reason is None
    for order, expected in zip(("row", "column"), (case.row, case.column), strict=True):
        if not expected:
            continue
        inputs, weights = operands(family, spec, order)
        prepared = library.prepare(spec, weights, case.knobs)
        out = torch.empty(spec.out_shape, dtype=getattr(torch, spec.out_dtype))
        library.bind(spec, case.knobs, device, inputs, prepared, out)  # may make what later ones reuse: a zero bias
        launches: list[Launch] = []
        bind = counter.count(
            lambda: launches.append(library.bind(spec, case.knobs, device, inputs, prepared, out))  # noqa: B023
        )
        assert bind == [], f"work outside what is timed, {order}"
        assert counter.count(launches[0]) == list(expected), order
        call = called(family, spec, device, Candidate.of(case.backend, dict(case.knobs)), inputs, weights)
        counter.count(call)
        in_a_call = ["linear" if name in ("mm", "addmm") else name for name in counter.count(call)]
        assert [name for name in in_a_call if name != "linear"] == [n for n in expected if n not in ("mm", "addmm")]
        assert len(in_a_call) == len(expected)


def test_a_copy_is_counted(counter: Counter) -> None:
    """The basis of the tests above: operators that move data are counted, views and allocations are not."""
    x = torch.zeros(8, 4)
    assert counter.count(lambda: x.t().view(4, 8).unsqueeze(0)) == []
    assert counter.count(lambda: torch.empty(3)) == []
    assert counter.count(lambda: x.t().contiguous()) == ["clone"]
    assert counter.count(lambda: torch.empty(8, 4).copy_(x)) == [COPY]
    assert counter.count(lambda: x.to(torch.bfloat16)) == ["_to_copy"]


@pytest.mark.parametrize("label", [label for name, label in OWN if name == "a8w8_blockscale"])
def test_operands_with_other_layouts_need_more_than_one_kernel(counter: Counter, label: str) -> None:
    """The counter includes a call's copies: a weight with other strides."""
    family = load_family("a8w8_blockscale")
    (implementation,) = (i for i in family.implementations if isinstance(i, KernelImplementation) and i.label == label)
    m = next(m for m in ROWS if list(fitting(implementation, spec_of(family, m), H200, space_of(family.name))))
    spec = spec_of(family, m)
    knobs = next(fitting(implementation, spec, H200, space_of(family.name)))
    inputs, weights = operands(family, spec, "row")
    turned = Weights(w=weights.w.t().contiguous().t(), w_scale=weights.w_scale)
    call = called(family, spec, H200, Candidate.of(label, knobs), inputs, turned)
    call()
    assert counter.count(call) == ["clone", "kernel"]
