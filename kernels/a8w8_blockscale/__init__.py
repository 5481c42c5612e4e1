"""out[M, N] = (x[M, K] * x_scale) @ (w[N, K] * w_scale)^T for fp8 operands with a scale for every block along K.

x and w are e4m3fn (e4m3fnuz on gfx942), row-major with K innermost. x_scale is fp32 [M, ceil(K/128)], one for 128
elements of a row; w_scale is fp32 [ceil(N/128), ceil(K/128)], one for a 128 x 128 tile. Accumulation is fp32, out is
bf16, fp16 or fp32; N and K may be ragged. This module has the key columns, the product of a key and the launch of
_kernel.py; _gluon.py launches _hopper_kernel.py; _engine.py launches _engine_kernel.py, which has the form of vLLM's
and SGLang's kernels, for their configuration files. Kernels for few rows are in gemmpipe/templates/small_m.py and
streamed.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.core.data import Device, Knobs, Problem, Scalar
from gemmpipe.family import Family, GemmSpec, KernelDefaults, KeyColumn, Scaling, bytes_moved, flops
from gemmpipe.family.aiter_table import RESULT_COLUMNS, AiterTable
from gemmpipe.family.dtypes import FP8_DTYPES, OUT_DTYPES, X_SCALE_COLUMN, check_choice, native_fp8, reject_bias
from gemmpipe.family.layouts import ROW_MAJOR
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.reference import product, tolerance
from gemmpipe.kernels.a8w8_blockscale import _gluon
from gemmpipe.kernels.a8w8_blockscale._engine import EngineBlockscale
from gemmpipe.kernels.a8w8_blockscale._engine_hopper import EngineBlockscaleHopper
from gemmpipe.kernels.a8w8_blockscale._gluon import BlockscaleWarpSpecialised
from gemmpipe.templates.params import (
    PREFETCH_PARAMETERS,
    SCALE_BLOCK,
    SCHEDULE_PARAMETERS,
    WORKSPACE_PARAMETERS,
    load_constants,
    operand_pointers,
    size_arguments,
    tile_constants,
)
from gemmpipe.templates.small_m import Skinny, Sliced
from gemmpipe.templates.streamed import Streamed
from gemmpipe.templates.tiled import TiledKernel


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """Defaults of the key: the architecture's fp8 format, bf16 out. Raises UserError."""
    reject_bias(kernel, "a8w8_blockscale")
    dtype = check_choice("kernel.dtype", kernel.dtype or native_fp8(gfx), FP8_DTYPES)
    out = check_choice("kernel.out_dtype", kernel.out_dtype or "bfloat16", OUT_DTYPES)
    return {"dtype": dtype, "outdtype": out}


def spec(problem: Problem) -> GemmSpec:
    """The product of a key. Raises UserError for a type that the kernels do not support."""
    key = dict(problem.key)
    dtype, out = str(key["dtype"]), str(key["outdtype"])
    check_choice(f"{problem.id}: dtype", dtype, FP8_DTYPES)
    check_choice(f"{problem.id}: outdtype", out, OUT_DTYPES)
    return GemmSpec(
        m=int(key["M"] or 0),
        n=int(key["N"] or 0),
        k=int(key["K"] or 0),
        x_dtype=dtype,
        w_dtype=dtype,
        out_dtype=out,
        x_scale=Scaling(granularity="block", block=(1, 128), order=_order(key.get("x_scale"))),
        w_scale=Scaling(granularity="block", block=(128, 128)),
    )


def _order(value: Scalar) -> str | None:
    return None if value is None else str(value)


@dataclass(frozen=True, kw_only=True)
class Blockscale(TiledKernel):
    """`triton`: one program per tile and split."""

    kernel: str = "gemmpipe.kernels.a8w8_blockscale._kernel:blockscale"
    supports_swap_ab: bool = True
    supports_pdl: bool = True
    supports_m_major_scales: bool = True

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """See _gluon.unsupported_reason."""
        return _gluon.unsupported_reason(spec, knobs, device)

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, scales, output and workspace."""
        pointers = operand_pointers(spec)
        del pointers["bias_ptr"]
        return {**pointers, **WORKSPACE_PARAMETERS}

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes, row strides, the schedule of tiles and the prefetch."""
        return {**size_arguments(spec, scale_group=SCALE_BLOCK), **SCHEDULE_PARAMETERS, **PREFETCH_PARAMETERS}

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and the constants that select branches."""
        return {
            **tile_constants(knobs),
            "SCALE_BLOCK": SCALE_BLOCK,
            "SPLIT_K": knobs["NUM_KSPLIT"] != 1,
            **load_constants(spec, knobs),
            "SWAP_AB": bool(knobs.get("SWAP_AB")),
            "SHUFFLED": spec.w_layout != ROW_MAJOR,
        }


FAMILY = Family(
    name="a8w8_blockscale",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="dtype", kind="dtype", default="float8_e4m3fn", aliases=("q_dtype_w",)),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
        X_SCALE_COLUMN,
    ),
    csv_name="a8w8_blockscale_tuned_gemm.csv",
    aiter_table=AiterTable(columns=("M", "N", "K", "libtype", *RESULT_COLUMNS), variable="GEMM_A8W8_BLOCKSCALE"),
    json_tag="A8W8_BLOCKSCALE",
    entry_point="gemm_a8w8_blockscale",
    key_defaults=key_defaults,
    spec=spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("scaled_mm", "torch"),
    implementations=(Blockscale(), BlockscaleWarpSpecialised(), Streamed(), Skinny(), Sliced()),
    engine_kernels={
        "vllm": EngineBlockscale(label="vllm", stepped=False, masks_always=True),
        "sglang": EngineBlockscaleHopper(label="sglang", stepped=True, masks_always=False),
    },
)
