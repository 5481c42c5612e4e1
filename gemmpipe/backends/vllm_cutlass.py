"""`vllm_cutlass`: vLLM's CUTLASS product of fp8 operands, an operator of vLLM's library, without importing vLLM."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.backends import Backend
from gemmpipe.backends.aten import library_violation
from gemmpipe.backends.packages import also_missing, not_installed
from gemmpipe.backends.scaled_mm import no_copy, scales_in_order
from gemmpipe.core.data import Device, Knobs
from gemmpipe.core.errors import one_line
from gemmpipe.core.spec import COLUMN
from gemmpipe.family import GemmSpec, Inputs, Launch, Prepared
from gemmpipe.family.dtypes import DTYPES_16BIT

if TYPE_CHECKING:
    import torch

PRODUCT, QUANTISE_BLOCKS, QUANTISE_ROWS = (
    "cutlass_scaled_mm",
    "per_token_group_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant",
)
_PARAMETERS = {PRODUCT: 6, QUANTISE_BLOCKS: 10, QUANTISE_ROWS: 4}
"""The operators called here, and their numbers of parameters as of vLLM 0.25."""
_LIBRARIES = ("_C_stable_libtorch*.so", "_C.abi3.so")


@cache
def operator(name: str) -> "Callable[..., None]":
    """The operator of vLLM's library, which is loaded if need be. Raises RuntimeError in one line."""
    import torch

    if not hasattr(torch.ops._C, name):
        _load_library()
    if not hasattr(torch.ops._C, name):
        raise RuntimeError(f"this vLLM has no operator {name}")
    found = getattr(torch.ops._C, name).default
    if len(found._schema.arguments) != _PARAMETERS[name]:
        raise RuntimeError(f"this vLLM's operator {name} has other parameters: expected those of vLLM 0.25")
    return found  # type: ignore[no-any-return]


def library_problem() -> str | None:
    """Why there are no operators, or None. Loads nothing."""
    import torch

    if hasattr(torch.ops._C, PRODUCT) or library_path() is not None:
        return None
    return "the installed vLLM has no library of operators for CUDA" if _vllm_folders() else not_installed("vllm")


def library_path() -> Path | None:
    """The library with vLLM's operators, if vLLM is installed. Imports nothing."""
    folders = _vllm_folders()
    return next((path for pattern in _LIBRARIES for root in folders for path in Path(root).glob(pattern)), None)


def _vllm_folders() -> list[str]:
    try:
        found = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        found = None
    return [] if found is None else list(found.submodule_search_locations or ())


def _load_library() -> None:
    import torch

    path = library_path()
    if path is None:
        raise RuntimeError(library_problem())
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        raise RuntimeError(f"vLLM's library of operators cannot be loaded: {one_line(error)}") from error


@dataclass(frozen=True, kw_only=True)
class VllmCutlass(Backend):
    """One candidate: the tile that vLLM chooses by the sizes."""

    label = "vllm_cutlass"
    reads_strides = False

    def unavailable(self, device: Device) -> str | None:
        """It needs an NVIDIA GPU and vLLM's library of operators."""
        missing = library_problem()
        if device.kind != "cuda":
            return also_missing("no NVIDIA GPU: vLLM's CUTLASS kernels are for NVIDIA only", missing)
        return missing

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """fp8 operands with scales by row, or of 1x128 and 128x128 blocks on Hopper."""
        if reason := self.form_violation(spec):
            return reason
        if _by_blocks(spec) and device.gfx != "sm_90":
            return f"block scales: on sm_90 only, not on {device.gfx}"
        return None

    def form_violation(self, spec: GemmSpec) -> str | None:
        """fp8 operands with scales by row, or of 1x128 and 128x128 blocks."""
        if problem := library_violation(spec):
            return problem
        if spec.x_dtype != "float8_e4m3fn" or spec.w_dtype != "float8_e4m3fn":
            return f"types: float8_e4m3fn twice, not {spec.x_dtype} and {spec.w_dtype}"
        if spec.x_scale is None or spec.w_scale is None or not (_by_blocks(spec) or _by_rows(spec)):
            return "scales: expected row x row or 1x128 x 128x128"
        if spec.out_dtype not in DTYPES_16BIT or spec.batch > 1 or spec.bias:
            return "form: 16-bit output, no bias, one product"
        if spec.n % 16 or spec.k % 16:
            return f"alignment: N={spec.n} and K={spec.k} must be multiples of 16"
        return None

    def bind(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> Launch:
        """A call of the operator that writes `out`; block scales of x that are not M-major are copied within it."""
        weights = prepared.weights
        if inputs.x_scale is None or weights.w_scale is None:
            raise ValueError("vllm_cutlass needs the scales of both operands")
        multiply, x, w_t = operator(PRODUCT), inputs.x.contiguous(), weights.w.t()
        copy_scales: Callable[[], object] = no_copy
        if _by_blocks(spec):
            x_scale, copy_scales = scales_in_order(inputs.x_scale, COLUMN)
            w_scale = weights.w_scale.contiguous().t()
        else:
            x_scale, w_scale = inputs.x_scale.reshape(-1, 1), weights.w_scale.reshape(-1, 1)

        def launch() -> "torch.Tensor":
            copy_scales()
            multiply(out, x, w_t, x_scale, w_scale, None)
            return out

        return launch


def _by_blocks(spec: GemmSpec) -> bool:
    scales = (spec.x_scale, spec.w_scale)
    blocks = tuple(scale.block for scale in scales if scale is not None and scale.granularity == "block")
    return blocks == ((1, 128), (128, 128))


def _by_rows(spec: GemmSpec) -> bool:
    return all(scale is not None and scale.granularity == "row" for scale in (spec.x_scale, spec.w_scale))
