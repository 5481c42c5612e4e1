"""`cublaslt`: the algorithms that cuBLASLt has for a product, by their attributes (extra `gemmpipe[cublaslt]`)."""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gemmpipe.backends import Backend
from gemmpipe.backends.aten import is_scaled, library_violation
from gemmpipe.backends.cublaslt_api import (
    ATTRIBUTES,
    MatmulDescriptors,
    Operation,
    UnsupportedAlgorithm,
    algorithms,
    bindings,
    library,
    version,
)
from gemmpipe.backends.packages import also_missing, not_installed
from gemmpipe.backends.scaled_mm import ScaledMm, no_copy, scaled_mm_violation, scales_in_order, weight_scales
from gemmpipe.core.data import Device, Knobs
from gemmpipe.core.spec import COLUMN
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared, Weights
from gemmpipe.family.dtypes import DTYPES_16BIT
from gemmpipe.launch.workspace import WORKSPACES

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

FAST_ACCUM = "use_fast_accum"
_ALIGNMENT = 16  # bytes, which the queries for algorithms assume
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)
_NO_GPU = "no NVIDIA GPU: cuBLASLt computes on NVIDIA GPUs only"


@dataclass(frozen=True, kw_only=True)
class CublasLt(Backend):
    """Candidates by an algorithm's attributes, and with scaled operands `use_fast_accum`.

    Attributes are valid in one version of the library only, so the candidate's `kernelName` contains the version: a
    stored candidate of another version is not run.
    """

    label = "cublaslt"
    reads_strides = False

    def unavailable(self, device: Device) -> str | None:
        """It needs an NVIDIA GPU, and nvmath-python, which exposes the library's algorithms."""
        if device.kind != "cuda":
            return also_missing(_NO_GPU, None if find_spec("nvmath") else not_installed("nvmath"))
        return _import_problem()

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """Every attribute, and `use_fast_accum`."""
        return (*ATTRIBUTES, FAST_ACCUM)

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """Every algorithm that the library lists; none without the library."""
        if self.unavailable(device) is not None:
            return ()
        if _type_violation(spec, device) is not None:
            return ({},)  # one config, for unsupported_reason
        return tuple(
            {**attributes, **({FAST_ACCUM: fast} if is_scaled(spec) else {})}
            for fast in ((False, True) if _has_switch(spec) else (False,))
            for attributes in algorithms(device.index, _operation(spec, fast))
        )

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The rules on types, then the library's own check of the algorithm for this product."""
        if reason := _type_violation(spec, device):
            return reason
        try:
            library(device.index).configure(_operation(spec, bool(knobs.get(FAST_ACCUM))), _attributes(knobs))
        except UnsupportedAlgorithm as reason:
            return str(reason)
        return None

    def kernel_name(self, knobs: Knobs) -> str:
        """`cublaslt_66_tile512_stages36@130100`: the algorithm and the library's version."""
        return f"{self.label}_{knobs['algo_id']}_tile{knobs['tile_id']}_stages{knobs['stages_id']}@{version()}"

    def prepare(self, spec: GemmSpec, weights: Weights, knobs: Knobs) -> Prepared:
        """The weight scales in the library's layout, the same as ScaledMm's."""
        return ScaledMm().prepare(spec, weights, knobs)

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call of the library on the current stream; operands with other strides or alignment are copied once."""
        import torch

        opened, operation = library(device.index), _operation(spec, bool(knobs.get(FAST_ACCUM)))
        configured = opened.configure(operation, _attributes(knobs))
        w, x, bias = _aligned(prepared.weights.w), _aligned(inputs.x), prepared.weights.bias
        bias = None if bias is None else _aligned(bias.to(out.dtype))
        x_scale, w_scale, copy_scales = _scales(spec, inputs, prepared)
        described = MatmulDescriptors(opened.lt, operation)
        described.set_pointers(w_scale=_address(w_scale), x_scale=_address(x_scale), bias=_address(bias))
        workspace, _ = WORKSPACES.take(configured.workspace_bytes // 4, 0, out.device)
        held = (described, configured, w, x, bias, x_scale, w_scale, workspace)  # the call has their addresses only
        arguments = (
            *(opened.handle, described.matmul, ctypes.addressof(_ONE)),
            *(w.data_ptr(), described.w, x.data_ptr(), described.x),
            *(ctypes.addressof(_ZERO), out.data_ptr(), described.out, out.data_ptr(), described.out),
            *(ctypes.addressof(configured.algo), workspace.data_ptr(), configured.workspace_bytes),
        )
        matmul, stream, index = opened.lt.matmul, torch._C._cuda_getCurrentRawStream, device.index

        def launch() -> "torch.Tensor":
            assert held
            copy_scales()
            matmul(*arguments, stream(index))
            return out

        return launch


@cache
def _import_problem() -> str | None:
    try:
        bindings()
    except ImportError:
        return not_installed("nvmath")
    try:
        version()
    except (RuntimeError, OSError) as error:
        return f"cuBLASLt cannot be loaded: {' '.join(str(error).split())[:150]}"
    return None


def _type_violation(spec: GemmSpec, device: Device) -> str | None:
    """One `if` per rule on types and layouts."""
    if device.kind != "cuda":
        return _NO_GPU
    if problem := library_violation(spec):
        return problem
    if is_scaled(spec):
        return scaled_mm_violation(spec, device)
    if spec.x_dtype not in DTYPES_16BIT or spec.w_dtype != spec.x_dtype:
        return f"types: {spec.x_dtype} x {spec.w_dtype} without scales, expected one of {', '.join(DTYPES_16BIT)} twice"
    if spec.out_dtype not in (spec.x_dtype, "float32"):
        return f"output type: {spec.out_dtype}, expected {spec.x_dtype} or float32"
    # Rows of either operand and of the output begin at multiples of 16 bytes, as every algorithm's loads are wide.
    if spec.k % 8 or spec.n % 8:
        return f"alignment: N={spec.n} and K={spec.k} must be multiples of 8"
    return None


def _has_switch(spec: GemmSpec) -> bool:
    """True if `use_fast_accum` matters: block scales are applied every 128 elements, 16-bit sums are always fp32."""
    return spec.x_scale is not None and spec.x_scale.granularity != "block"


def _operation(spec: GemmSpec, fast: bool) -> Operation:
    return Operation(
        m=spec.m,
        n=spec.n,
        k=spec.k,
        dtype=spec.x_dtype,
        out_dtype=spec.out_dtype,
        scale="" if spec.x_scale is None else spec.x_scale.granularity,
        bias=spec.bias,
        fast_accum=fast,
    )


def _attributes(knobs: Knobs) -> dict[str, int]:
    """The knobs that are attributes. Raises KeyError for a missing one."""
    return {name: int(str(knobs[name])) for name in ATTRIBUTES}


def _aligned(tensor: "torch.Tensor") -> "torch.Tensor":
    rows = tensor.contiguous()
    return rows.clone() if rows.data_ptr() % _ALIGNMENT else rows


def _address(tensor: "torch.Tensor | None") -> int | None:
    return None if tensor is None else int(tensor.data_ptr())


def _scales(
    spec: GemmSpec, inputs: Inputs, prepared: Prepared
) -> "tuple[torch.Tensor | None, torch.Tensor | None, Callable[[], object]]":
    """(scales of x, M-major for blocks; scales of w as prepared; a call before each product, see scales_in_order)."""
    if spec.x_scale is None:
        return None, None, no_copy
    w_scale = weight_scales(prepared)
    if inputs.x_scale is None or w_scale is None:
        raise ValueError("cublaslt needs the scales of both operands")
    if spec.x_scale.granularity != "block":
        return _aligned(inputs.x_scale), _aligned(w_scale), no_copy
    x_scale, copy_scales = scales_in_order(inputs.x_scale, COLUMN)
    return x_scale, w_scale, copy_scales
