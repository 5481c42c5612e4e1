"""Contract tests of the AMD backends: a stand-in for the package aiter, with its documented signatures, on the CPU.

They show that arguments arrive in the right places, shapes and layouts; nothing here has run on AMD hardware.
"""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from gemmpipe.backends import NO_SPACE, hipblaslt
from gemmpipe.backends import aiter as kernels_of_aiter
from gemmpipe.backends.aiter import Aiter
from gemmpipe.backends.hipblaslt import HipblasLt
from gemmpipe.data import Device, Knobs
from gemmpipe.device import arch_device, cpu_device
from gemmpipe.family import GemmSpec, Implementation, KernelDefaults, load_family
from gemmpipe.layouts import plain
from gemmpipe.problem import make_problem
from gemmpipe.reference import error_ratio

Optional = torch.Tensor | None


class PretendedHip(Device):
    """An MI300X whose memory is the CPU's."""

    @property
    def torch_name(self) -> str:
        return "cpu"


@pytest.fixture
def device() -> Device:
    known = arch_device("gfx942")
    return PretendedHip(**{name: getattr(known, name) for name in known.__dataclass_fields__})


def hipb_mm(
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    solution_index: int,
    bias: Optional = None,
    out_dtype: torch.dtype | None = None,
    scaleA: Optional = None,
    scaleB: Optional = None,
    scaleOut: Optional = None,
    bpreshuffle: bool | None = None,
) -> torch.Tensor:
    assert solution_index in (7, 21434)
    full = mat1.float() @ mat2.float()
    full = full if scaleA is None or scaleB is None else full * scaleA * scaleB
    return (full if bias is None else full + bias.float()).to(out_dtype)


def hipb_findallsols(
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    bias: Optional = None,
    out_dtype: torch.dtype | None = None,
    scaleA: Optional = None,
    scaleB: Optional = None,
    scaleC: Optional = None,
    bpreshuffle: bool = False,
) -> list[int]:
    assert mat1.shape[1] == mat2.shape[0]
    assert (scaleA is None) == (mat1.dtype.itemsize > 1)
    return [21434, 7, 21434]


def gemm_a16w16_asm(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor,
    bias: Optional = None,
    splitK: int | None = None,
    kernelName: str | None = None,
    bpreshuffle: bool = False,
) -> torch.Tensor:
    assert splitK is not None
    assert 1 <= splitK <= 16
    full = A.float() @ B.float().T
    return out.copy_(full if bias is None else full + bias.float())


def _ck(least_m_major: bool, shuffled: bool) -> Callable[..., torch.Tensor]:
    def tune(
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        Out: torch.Tensor,
        kernelId: int = 0,
        splitK: int = 0,
    ) -> torch.Tensor:
        assert 0 <= splitK <= 3
        w = (plain(WQ, "n16k16") if shuffled else WQ).float()
        if x_scale.shape[-1] == 1:
            assert w_scale.shape[-2] == 1, "the weight's scales are a row [1, N]"
            return Out.copy_((XQ.float() @ w.mT) * x_scale * w_scale)
        rows, blocks = x_scale.shape
        spread = x_scale.reshape(blocks, rows).T if least_m_major else x_scale
        x = XQ.float() * spread.repeat_interleave(128, 1)[:, : XQ.shape[1]]
        scales = w_scale.repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, : w.shape[1]]
        return Out.copy_(x @ (w * scales).T)

    return tune


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = ModuleType("aiter")
    module.opened = []  # type: ignore[attr-defined]
    module.hipb_create_extension = lambda: module.opened.append(1)  # type: ignore[attr-defined]
    for function in (hipb_mm, hipb_findallsols, gemm_a16w16_asm):
        setattr(module, function.__name__, function)
    module.gemm_a8w8_tune = _ck(False, False)  # type: ignore[attr-defined]
    module.gemm_a8w8_blockscale_tune = _ck(False, False)  # type: ignore[attr-defined]
    module.gemm_a8w8_bpreshuffle_tune = _ck(False, True)  # type: ignore[attr-defined]
    module.gemm_a8w8_blockscale_bpreshuffle_tune = _ck(True, True)  # type: ignore[attr-defined]
    module.batched_gemm_a8w8_tune = _ck(False, False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter", module)
    monkeypatch.setattr(
        "torch.cuda.tunable.get_validators", lambda: (("PT_VERSION", "2.11"), ("HIPBLASLT_VERSION", "100101-abc"))
    )
    cached = (
        hipblaslt.aiter_missing,
        hipblaslt._opened,
        hipblaslt._version,
        hipblaslt._solutions,
        kernels_of_aiter._version,
    )
    for function in cached:
        function.cache_clear()
    yield module
    for function in cached:
        function.cache_clear()


def _spec(family: str, m: int, n: int, k: int, **words: object) -> GemmSpec:
    given = {"dtype": None, "out_dtype": None, "bias": None, **words}
    key = {"B": 3} if family.startswith("batched") else {}
    defaults = KernelDefaults(**given)  # type: ignore[arg-type]
    found = load_family(family)
    return found.spec(make_problem(found, {"M": m, "N": n, "K": k, **key}, defaults, "gfx942", "test"))


def _error(family: str, spec: GemmSpec, implementation: Implementation, knobs: Knobs, device: Device) -> float:
    found, generator = load_family(family), torch.Generator().manual_seed(5)
    weights, inputs = found.make_weights(spec, generator), found.make_inputs(spec, generator)
    shape = (spec.m, spec.n) if spec.batch == 1 else (spec.batch, spec.m, spec.n)
    out = torch.full(shape, float("nan"), dtype=getattr(torch, spec.out_dtype))
    prepared = implementation.prepare(spec, weights, knobs)
    launch = implementation.bind(spec, knobs, device, inputs, prepared, out)
    return error_ratio(launch(), found.reference(spec, inputs, weights), *found.tolerance(spec))


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("a16w16", {}),
        ("a16w16", {"dtype": "float16", "bias": True, "out_dtype": "float32"}),
        ("a16w16", {"dtype": "float8_e4m3fnuz"}),
        ("a16w16_atomic", {}),
    ],
)
def test_hipblaslts_solutions(family: str, words: dict[str, object], package: ModuleType, device: Device) -> None:
    backend, spec = HipblasLt(), _spec(family, 5, 48, 64, **words)
    assert backend.unavailable(device) is None
    points = list(backend.points(spec, device, NO_SPACE))
    assert points == [{"solidx": 21434}, {"solidx": 7}]
    for knobs in points:
        assert backend.misfit(spec, knobs, device) is None
        assert _error(family, spec, backend, knobs, device) == 0
    assert backend.kernel_name(points[1]) == "hipblaslt_7@100101-abc"
    assert backend.misfit(spec, {"solidx": 8}, device) == "solution: hipBLASLt lists no 8 for this product"
    assert package.opened == [1]


@pytest.mark.parametrize(
    ("family", "words", "label", "count"),
    [
        ("a16w16", {}, "asm", 8),
        ("a16w16", {"bias": True, "out_dtype": "float32"}, "asm", 8),
        ("a8w8", {"dtype": "int8"}, "ck", 86 * 4),
        ("a8w8", {"dtype": "float8_e4m3fnuz"}, "ck", 86 * 4),
        ("a8w8_blockscale", {}, "ck", 19 * 4),
        ("a8w8_bpreshuffle", {"dtype": "int8"}, "ck", 159 * 4),
        ("a8w8_blockscale_bpreshuffle", {}, "ck", 18 * 4),
        ("batched_a8w8", {"dtype": "int8"}, "ck", 86 * 4),
    ],
)
@pytest.mark.usefixtures("package")
def test_aiters_kernels(family: str, words: dict[str, object], label: str, count: int, device: Device) -> None:
    spec = _spec(family, 32, 256, 384, **words)
    fitting = {}
    for implementation in Aiter().implementations(load_family(family)):
        assert implementation.unavailable(device) is None
        points = list(implementation.points(spec, device, NO_SPACE))
        fitting[implementation.label] = [p for p in points if implementation.misfit(spec, p, device) is None]
        for knobs in fitting[implementation.label][:: max(1, count // 4)]:
            assert _error(family, spec, implementation, knobs, device) == 0
    assert {name: len(points) for name, points in fitting.items() if points} == {label: count}


def test_without_the_package_or_the_hardware_they_offer_nothing(device: Device) -> None:
    spec, cpu = _spec("a16w16", 5, 48, 64), cpu_device()
    assert "aiter" not in sys.modules
    hipblaslt.aiter_missing.cache_clear()
    for backend in (HipblasLt(), *Aiter().implementations(load_family("a16w16"))):
        assert "no AMD GPU" in str(backend.unavailable(cpu))
        assert "the package aiter cannot be imported: No module named 'aiter'" in str(backend.unavailable(device))
        assert list(backend.points(spec, device, NO_SPACE)) == list(backend.points(spec, cpu, NO_SPACE)) == []
