"""`hipblaslt`: all solutions that hipBLASLt has for a product, through aiter's `hipb_findallsols` and `hipb_mm`.

Written to the documented interface of aiter, unverified on hardware.
"""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gemmpipe.backends import Backend
from gemmpipe.backends.aten import is_scaled, library_violation
from gemmpipe.core.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared
from gemmpipe.family.dtypes import DTYPES_16BIT
from gemmpipe.family.layouts import ROW_MAJOR, TILES_16X16
from gemmpipe.family.operands import torch_dtype

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

SOLIDX = "solidx"
LIBRARY_CHOICE = -1
"""The index with which `hipb_mm` takes the library's own choice (with HIP_ONLINE_TUNING=1 after tuning)."""
_NO_GPU = "no AMD GPU: hipBLASLt computes on AMD GPUs only"


@dataclass(frozen=True, kw_only=True)
class HipblasLt(Backend):
    """Candidates by one knob, `solidx`: the index of a kernel, valid in one version of the library only.

    The candidate's `kernelName` contains the version, and a stored candidate of another version is not run.
    """

    label = "hipblaslt"

    def unavailable(self, device: Device) -> str | None:
        """It needs an AMD GPU and the package aiter."""
        if device.kind != "hip":
            return _NO_GPU
        return aiter_import_problem()

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """`solidx`."""
        return (SOLIDX,)

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Every solution that the library lists; none without the library."""
        if self.unavailable(device) is not None:
            return ()
        if _type_violation(spec, device) is not None:
            return ({SOLIDX: -1},)  # one config, for unsupported_reason
        return tuple({SOLIDX: index} for index in (*_solutions(spec, device.torch_name), *_library_choice(spec)))

    def knobs_from_row(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """A row of aiter's: its `solidx`; without one the library's own choice."""
        return {SOLIDX: row[SOLIDX] if isinstance(row.get(SOLIDX), int) else LIBRARY_CHOICE}

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The rules on types, then whether the library lists this solution for the product."""
        if reason := _type_violation(spec, device):
            return reason
        if knobs[SOLIDX] != LIBRARY_CHOICE and knobs[SOLIDX] not in _solutions(spec, device.torch_name):
            return f"solution: hipBLASLt lists no {knobs[SOLIDX]} for this product"
        return None

    def kernel_name(self, knobs: Knobs) -> str:
        """`hipblaslt_21434@100101-1a2b3c`: the index and the library's version."""
        return f"{self.label}_{knobs[SOLIDX]}@{_version()}"

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call of `hipb_mm`, which allocates its output."""
        library, index = _library(), int(str(knobs[SOLIDX]))
        weights = prepared.weights
        w_t, shuffled = weights.w.t(), spec.w_layout != ROW_MAJOR

        def launch() -> "torch.Tensor":
            product: torch.Tensor = library.hipb_mm(
                inputs.x,
                w_t,
                index,
                bias=weights.bias,
                out_dtype=out.dtype,
                scaleA=inputs.x_scale,
                scaleB=weights.w_scale,
                bpreshuffle=shuffled,
            )
            return product

        return launch


@cache
def aiter_import_problem() -> str | None:
    """Why the package aiter cannot be used here, or None."""
    try:
        importlib.import_module("aiter")
    except ImportError as error:
        return f"the package aiter cannot be imported: {error}; it is AMD's, from github.com/ROCm/aiter"
    return None


@cache
def _library() -> ModuleType:
    library = importlib.import_module("aiter")
    library.hipb_create_extension()
    return library


@cache
def _version() -> str:
    """The library's version as TunableOp and its result files name it."""
    import torch

    validators: Any = torch.cuda.tunable.get_validators()  # pairs, unlike its annotation
    return str(dict(validators).get("HIPBLASLT_VERSION", "unknown"))


def _type_violation(spec: GemmSpec, device: Device) -> str | None:
    """One `if` per rule on types and layouts."""
    if device.kind != "hip":
        return _NO_GPU
    shuffled = spec.w_layout == TILES_16X16 and not is_scaled(spec)
    if problem := library_violation(replace(spec, w_layout=ROW_MAJOR) if shuffled else spec):
        return problem
    if is_scaled(spec):
        kinds = {scale.granularity if scale else "none" for scale in (spec.x_scale, spec.w_scale)}
        if kinds != {"tensor"} or not spec.x_dtype.startswith("float8"):
            return f"scales: hipb_mm takes fp8 with one scale per operand, not {spec.x_dtype} by {sorted(kinds)}"
        return None
    if spec.x_dtype not in DTYPES_16BIT or spec.w_dtype != spec.x_dtype:
        return f"types: {spec.x_dtype} x {spec.w_dtype} without scales, expected one of {', '.join(DTYPES_16BIT)} twice"
    return None


def _library_choice(spec: GemmSpec) -> tuple[int, ...]:
    """LIBRARY_CHOICE for shuffled weights; with row-major ones it is torch's product, another candidate."""
    return () if spec.w_layout == ROW_MAJOR else (LIBRARY_CHOICE,)


@lru_cache(maxsize=1024)
def _solutions(spec: GemmSpec, device: str) -> tuple[int, ...]:
    """The indices that the library lists for operands of these shapes and types, allocated for the query."""
    import torch

    def empty(*shape: int, dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=torch_dtype(dtype), device=device)

    scale = torch.ones(1, device=device) if spec.x_scale else None
    found: list[int] = _library().hipb_findallsols(
        empty(spec.m, spec.k, dtype=spec.x_dtype),
        empty(spec.n, spec.k, dtype=spec.w_dtype).t(),
        bias=empty(spec.n, dtype=spec.out_dtype) if spec.bias else None,
        out_dtype=torch_dtype(spec.out_dtype),
        scaleA=scale,
        scaleB=scale,
        bpreshuffle=spec.w_layout != ROW_MAJOR,
    )
    return tuple(dict.fromkeys(int(index) for index in found))
