"""Operators that quantise activations in vLLM's compiled graphs, with the names, schemas and results of vLLM's own.

`gemmpipe::rms_norm_per_block_quant` and `gemmpipe::silu_and_mul_per_block_quant` launch our kernels
(templates/fused_quantise.py), which let the product that follows load its weights meanwhile. A call that our kernels do
not cover is passed to vLLM's operator. `gemmpipe::rms_norm_per_block_quant_out` writes the sum to another tensor than
the residual, which a compiled graph would copy where it is an input of the graph.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch

from gemmpipe.core.data import Build, Device
from gemmpipe.core.errors import one_line
from gemmpipe.family.dtypes import FP8_MAX
from gemmpipe.launch.build import load_build
from gemmpipe.plugins.engine_dispatch import DTYPES_16BIT
from gemmpipe.runtime.binding import device_context, is_capturing
from gemmpipe.runtime.cache import device_by_index
from gemmpipe.runtime.operands import OptionalTensor, dtype_name
from gemmpipe.runtime.torch_ops import register_operators
from gemmpipe.templates.fused_quantise import (
    GROUP,
    MAX_NORM_K,
    OUT_DTYPE,
    BoundKernel,
    bound_kernel,
    group_build,
    launch_groups,
    launch_norm,
    norm_build,
    norm_shape,
    silu_build,
    silu_shape,
)

_LOG = logging.getLogger("vllm.gemmpipe")
NORM, SILU = "rms_norm_per_block_quant", "silu_and_mul_per_block_quant"
NORM_OUT = f"{NORM}_out"
GROUPS = "per_token_group_fp8_quant"
SCHEMAS: Mapping[str, str] = {
    NORM: "(Tensor(a!) result, Tensor input, Tensor weight, Tensor(b!) scale, float epsilon, Tensor? scale_ub, "
    "Tensor(c!)? residual, int group_size, bool is_scale_transposed) -> ()",
    SILU: "(Tensor(a!) out, Tensor input, Tensor(b!) scales, int group_size, Tensor? scale_ub=None, "
    "bool is_scale_transposed=False) -> ()",
    GROUPS: "(Tensor input, Tensor(a!) output_q, Tensor(b!) output_s, int group_size, float eps, float fp8_min, "
    "float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()",
    NORM_OUT: "(Tensor(a!) result, Tensor input, Tensor weight, Tensor(b!) scale, float epsilon, Tensor? scale_ub, "
    "Tensor residual, Tensor(c!) total, int group_size, bool is_scale_transposed) -> ()",
}
"""The operators' schemas: as in vLLM 0.25 to 0.33, and NORM_OUT with what is written in the order of NORM's."""
EPSILON = 1e-10
"""The least maximum of a group, the default of vLLM's function."""
OLDEST_ARCH = 89
"""The first architecture that converts to fp8."""
_ALIGNED = 16
"""Bytes of a load or store, and elements that a stride between rows is a multiple of."""
_LOADED: dict[tuple[object, ...], BoundKernel | None] = {}
_NOTHING = nullcontext()
_ENGINE: dict[str, Callable[..., None]] = {}
_ANNOUNCE: list[Callable[[], None]] = []

_norm_shape, _silu_shape = lru_cache(maxsize=4096)(norm_shape), lru_cache(maxsize=4096)(silu_shape)


def register_quantise_operators(
    engine: Mapping[str, Callable[..., None]], announce: Callable[[], None] | None = None
) -> None:
    """Register the operators; `engine` has vLLM's own by name. A second call replaces what is given alone.

    `announce` is called before a kernel is loaded.
    """
    register_operators()
    _library()
    _ENGINE.update(engine)
    _ANNOUNCE[:] = [announce] if announce is not None else []


def are_registered() -> bool:
    """True after `register_quantise_operators`: activations of products by blocks come from our quantisers."""
    return bool(_ENGINE)


@cache
def _library() -> torch.library.Library:
    """The operators, kept for the process; without tags, as vLLM's: torch passes both the strides that they have."""
    library = torch.library.Library("gemmpipe", "FRAGMENT")
    for name, run in ((NORM, run_norm), (NORM_OUT, run_norm_out), (SILU, run_silu), (GROUPS, run_groups)):
        library.define(name + SCHEMAS[name])
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gemmpipe::{name}", _fake, lib=library)
    return library


def _fake(*operands: Any, **named: Any) -> None:
    """Outputs are operands: nothing to make."""


def scale_strides(scale: torch.Tensor, rows: int, groups: int, transposed: bool) -> tuple[int, int] | None:
    """Elements between the scales of rows and of groups, where vLLM's operators write; None for another tensor.

    Transposed scales [rows, groups] are stored group after group, each padded to at least `rows`.
    """
    if scale.dtype != torch.float32 or scale.dim() != 2 or scale.shape != (rows, groups):
        return None
    row, group = scale.stride()
    if not transposed:
        return (groups, 1) if scale.is_contiguous() else None
    padded = -(-rows // max(1, group)) * max(1, group)
    if (row != 1 and rows > 1) or (group < rows and groups > 1 and rows > 1):
        return None
    return 1, padded


def run_norm(
    result: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    epsilon: float,
    scale_ub: OptionalTensor,
    residual: OptionalTensor,
    group_size: int,
    is_scale_transposed: bool,
) -> None:
    """result [M, K] in fp8 and its scales of rms_norm(x + residual) * weight; residual becomes the sum."""
    strides = _covered(result, x, scale, scale_ub, group_size, is_scale_transposed, 1, NORM)
    if strides is None or not _launched(result, x, weight, scale, epsilon, residual, residual, strides):
        _ENGINE[NORM](result, x, weight, scale, epsilon, scale_ub, residual, group_size, is_scale_transposed)


def run_norm_out(
    result: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    epsilon: float,
    scale_ub: OptionalTensor,
    residual: torch.Tensor,
    total: torch.Tensor,
    group_size: int,
    is_scale_transposed: bool,
) -> None:
    """The same with the sum in `total`; residual is read alone."""
    strides = _covered(result, x, scale, scale_ub, group_size, is_scale_transposed, 1, NORM)
    if strides is None or not _launched(result, x, weight, scale, epsilon, residual, total, strides):
        total.copy_(residual)
        _ENGINE[NORM](result, x, weight, scale, epsilon, scale_ub, total, group_size, is_scale_transposed)


def _launched(
    result: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    epsilon: float,
    residual: OptionalTensor,
    total: OptionalTensor,
    strides: tuple[int, int],
) -> bool:
    """Launch our norm; False if it does not cover the weight, the residual or the sum, or cannot be loaded."""
    if not all(_fits(x, each) for each in (residual, total)):
        return False
    if weight.dtype != x.dtype or weight.shape != x.shape[1:] or not weight.is_contiguous():
        return False
    device = device_by_index(x.get_device())
    (rows, k), dtype, added = x.shape, x.dtype, residual is not None
    shape = _norm_shape(rows, k, device.cu_num)
    kernel = _load(
        (NORM, device.index, k, dtype, epsilon, added, shape),
        lambda: norm_build(k, dtype_name(dtype), epsilon, residual=added, shape=shape, device=device),
        device,
    )
    if kernel is None or weight.data_ptr() % _ALIGNED:
        return False
    with _current(device):
        launch_norm(kernel, result, x, weight, scale, residual, total, strides)
    return True


def run_silu(
    out: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    scale_ub: OptionalTensor = None,
    is_scale_transposed: bool = False,
) -> None:
    """out [M, size] in fp8 and its scales of silu(x[:, :size]) * x[:, size:]."""
    strides = _covered(out, x, scales, scale_ub, group_size, is_scale_transposed, 2, SILU)
    if strides is not None and (not is_scale_transposed or strides[1] == len(out)):  # vLLM's does not pad scales
        device = device_by_index(x.get_device())
        rows, size = out.shape
        shape, dtype = _silu_shape(rows, size, device.cu_num), x.dtype
        kernel = _load(
            (SILU, device.index, size, dtype, shape),
            lambda: silu_build(size, dtype_name(dtype), shape=shape, device=device),
            device,
        )
        if kernel is not None:
            with _current(device):
                launch_groups(kernel, out, x, scales, strides, shape)
            return
    _ENGINE[SILU](out, x, scales, group_size, scale_ub, is_scale_transposed)


def run_groups(
    x: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    epsilon: float,
    lowest: float,
    highest: float,
    power_of_two: bool,
    transposed: bool,
    aligned: bool,
) -> None:
    """out [M, size] in fp8 and its scales of x; vLLM's operator sees in the strides whether scales are transposed."""
    by_columns = scales.dim() == 2 and scales.stride(0) < scales.stride(1)
    strides = _covered(out, x, scales, None, group_size, by_columns, 1, GROUPS)
    if strides is not None and -lowest == highest == FP8_MAX[OUT_DTYPE]:
        device = device_by_index(x.get_device())
        (rows, size), dtype = out.shape, x.dtype
        shape = _silu_shape(rows, size, device.cu_num)
        kernel = _load(
            (GROUPS, device.index, size, dtype, epsilon, power_of_two, shape),
            lambda: group_build(
                size, dtype_name(dtype), epsilon, power_of_two=power_of_two, shape=shape, device=device
            ),
            device,
        )
        if kernel is not None:
            with _current(device):
                launch_groups(kernel, out, x, scales, strides, shape)
            return
    _ENGINE[GROUPS](x, out, scales, group_size, epsilon, lowest, highest, power_of_two, transposed, aligned)


def quantise_groups(
    x: torch.Tensor, group_size: int, *, by_columns: bool, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K], contiguous, in fp8, and its scales: the tensors that vLLM's function of the operator GROUPS makes."""
    rows, groups = x.shape[0], x.shape[1] // group_size
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    shape = (groups, rows) if by_columns else (rows, groups)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    scales = scales.t() if by_columns else scales
    highest = FP8_MAX[OUT_DTYPE]
    run_groups(x, out, scales, group_size, EPSILON, -highest, highest, power_of_two, by_columns, False)
    return out, scales


def _covered(
    out: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    scale_ub: OptionalTensor,
    group_size: int,
    transposed: bool,
    parts: int,
    name: str,
) -> tuple[int, int] | None:
    """The strides of the scales if our kernels cover x [M, parts * columns] and out [M, columns]; None if not."""
    if scale_ub is not None or group_size != GROUP or not runs_on(x):
        return None
    if x.dim() != 2 or out.dim() != 2 or x.dtype not in DTYPES_16BIT or out.dtype != torch.float8_e4m3fn:
        return None
    rows, columns = out.shape
    if x.shape != (rows, parts * columns) or rows == 0 or columns == 0 or columns % GROUP:
        return None
    if x.stride(1) != 1 or x.stride(0) % _ALIGNED or not out.is_contiguous():
        return None
    if x.data_ptr() % _ALIGNED or out.data_ptr() % _ALIGNED or scale.data_ptr() % _ALIGNED:
        return None
    if name == NORM and columns > MAX_NORM_K:
        return None
    return scale_strides(scale, rows, columns // GROUP, transposed)


def runs_on(x: torch.Tensor) -> bool:
    """True for tensors of a device with our kernels: NVIDIA's from sm_89 on."""
    return x.is_cuda and has_kernels(device_by_index(x.get_device()))


def has_kernels(device: Device) -> bool:
    """True for a device that converts to fp8 and that our kernels are compiled for."""
    return device.kind == "cuda" and int(device.gfx.removeprefix("sm_").rstrip("af")) >= OLDEST_ARCH


def _fits(x: torch.Tensor, residual: OptionalTensor) -> bool:
    """True if the norm's kernel reads and writes a residual, or there is none."""
    if residual is None:
        return True
    same = residual.dtype == x.dtype and residual.shape == x.shape and residual.is_contiguous()
    return same and not residual.data_ptr() % _ALIGNED


def _current(device: Device) -> AbstractContextManager[object]:
    """Make a device current that is not: kernels are launched on the current one."""
    return _NOTHING if torch.cuda.current_device() == device.index else device_context(device)


def _load(key: tuple[object, ...], make: Callable[[], Build], device: Device) -> BoundKernel | None:
    """The kernel of a key; None if it cannot be loaded, or not now: nothing may be compiled inside a graph capture."""
    if key in _LOADED:
        return _LOADED[key]
    if is_capturing(device):
        return None
    for announce in _ANNOUNCE:
        announce()
    kernel = None
    try:
        with device_context(device):
            kernel = bound_kernel(load_build(make(), device))
    except Exception as error:  # noqa: BLE001 - vLLM's operator computes the same
        _LOG.warning("gemmpipe: left to the engine: %s: %s", key[0], one_line(error))
    _LOADED[key] = kernel
    return kernel


def forget_kernels() -> None:
    """Load every kernel again at its next call."""
    _LOADED.clear()
