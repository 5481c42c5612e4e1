"""out[M, N] = (x[M, K] * x_scale) @ (w[N, K] * w_scale)^T for MXFP4 operands (OCP microscaling).

x is [M, K/2] and w [N, K/2], row-major, torch.float4_e2m1fn_x2: two e2m1 values (0 .5 1 1.5 2 3 4 6 and their
negatives) a byte along K, the low nibble the even k. x_scale is [M, K/32] and w_scale [N, K/32], row-major,
torch.float8_e8m0fnu: byte b scales 32 elements along K by 2**(b - 127). This is aiter's gemm_afp4wfp4 (uint8 there);
its asm kernels' a4w4 tables, keyed M N K with K in elements, are for shuffled weights and scales. Accumulation is fp32,
out is bf16, fp16 or fp32; K is a multiple of 32. Chips without such instructions multiply decoded bf16, which holds
every product of value and scale exactly. The kernel is in _kernel.py; this module has the key columns, the product of a
key, and the launch with its constraints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from gemmpipe.core.data import Device, Knobs, Problem, Scalar
from gemmpipe.core.errors import UserError
from gemmpipe.family import Family, GemmSpec, Inputs, KernelDefaults, KeyColumn, Prepared, Scaling, bytes_moved, flops
from gemmpipe.family.aiter_table import RESULT_COLUMNS, AiterTable
from gemmpipe.family.dtypes import FP4, OUT_DTYPES, check_choice, reject_bias
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.reference import product, tolerance
from gemmpipe.templates.constraints import tile_violation
from gemmpipe.templates.params import (
    SCHEDULE_PARAMETERS,
    TRITON_TYPES,
    WORKSPACE_PARAMETERS,
    load_constants,
    size_arguments,
    tile_constants,
)
from gemmpipe.templates.tiled import TiledKernel

if TYPE_CHECKING:
    import torch


SCALE_GROUP = 32


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """Defaults of the key: bf16 out. Raises UserError."""
    reject_bias(kernel, "a4w4_blockscale")
    check_choice("kernel.dtype", kernel.dtype or FP4, (FP4,))
    out = check_choice("kernel.out_dtype", kernel.out_dtype or "bfloat16", OUT_DTYPES)
    return {"outdtype": out}


def spec(problem: Problem) -> GemmSpec:
    """The product of a key. Raises UserError for a type or K that the kernels do not support."""
    key = dict(problem.key)
    out, k = str(key["outdtype"]), int(key["K"] or 0)
    check_choice(f"{problem.id}: outdtype", out, OUT_DTYPES)
    if k % SCALE_GROUP:
        raise UserError(f"{problem.id}: K={k}, expected a multiple of {SCALE_GROUP} (the elements per scale)")
    scaling = Scaling(granularity="block", block=(1, SCALE_GROUP), dtype="float8_e8m0fnu", order="row")
    return GemmSpec(
        m=int(key["M"] or 0),
        n=int(key["N"] or 0),
        k=k,
        x_dtype=FP4,
        w_dtype=FP4,
        out_dtype=out,
        x_scale=scaling,
        w_scale=scaling,
    )


@dataclass(frozen=True, kw_only=True)
class Microscaled(TiledKernel):
    """`triton`: row-major scales, one program per tile and split."""

    kernel: str = "gemmpipe.kernels.a4w4_blockscale._kernel:microscaled"

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        scaling = tuple((scale.block, scale.dtype) if scale else None for scale in (spec.x_scale, spec.w_scale))
        if scaling != (((1, SCALE_GROUP), "float8_e8m0fnu"),) * 2:
            return f"scales: this kernel reads one e8m0 scale per {SCALE_GROUP} elements along K, not {scaling}"
        if device.gfx == "gfx942" and not _decodes_for_cdna3():
            return f"compiler: triton {version('triton')} has no MXFP4 product for gfx942, expected 3.9 or later"
        return tile_violation(spec, knobs, device, accumulators=1)

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands and scales as bytes, output and workspace."""
        return {
            "x_ptr": "*u8",
            "w_ptr": "*u8",
            "x_scale_ptr": "*u8",
            "w_scale_ptr": "*u8",
            "out_ptr": f"*{TRITON_TYPES[spec.out_dtype]}",
            **WORKSPACE_PARAMETERS,
        }

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes, row strides and the schedule of tiles."""
        return {**size_arguments(spec, packed=2, scale_group=SCALE_GROUP), **SCHEDULE_PARAMETERS}

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and the constants that select branches."""
        return {**tile_constants(knobs), "SPLIT_K": knobs["NUM_KSPLIT"] != 1, **load_constants(spec, knobs)}

    def arguments(self, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Mapping[str, object]:
        """The tensors as bytes, and their actual row strides."""
        import torch

        given = super().arguments(inputs, prepared, out)
        return {
            name: value.view(torch.uint8) if isinstance(value, torch.Tensor) and name != "out_ptr" else value
            for name, value in given.items()
        }


@cache
def _decodes_for_cdna3() -> bool:
    """Triton 3.6 fails with `Unsupported DotScaleOp` there, 3.9 compiles; versions between are untested."""
    major, minor = version("triton").split(".")[:2]
    return (int(major), int(minor)) >= (3, 9)


FAMILY = Family(
    name="a4w4_blockscale",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
    ),
    csv_name="a4w4_blockscale_tuned_gemm.csv",
    aiter_table=AiterTable(
        columns=("M", "N", "K", *RESULT_COLUMNS), powers=("", "ck", "cktile", "asm"), variable="GEMM_A4W4"
    ),
    json_tag="AFP4WFP4",
    entry_point="gemm_a4w4_blockscale",
    key_defaults=key_defaults,
    spec=spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(Microscaled(),),
)
