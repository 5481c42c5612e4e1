"""out[M, N] = (x[M, K] * x_scale) @ (w[N, K] * w_scale)^T: block-scaled fp8 with a pre-shuffled weight.

x is e4m3fn (e4m3fnuz on gfx942), row-major with K innermost. x_scale is fp32 [M, ceil(K/128)], one for 128 elements
of a row, stored transposed: stride (1, M), as aiter's gemm_a8w8_blockscale_preshuffle takes it by default. w is of
x's type in 16 x 16 tiles: element (n, k) is at (n // 16) * 16 * K + (k // 16) * 256 + (n % 16) * 16 + k % 16, as
aiter's shuffle_weight(w, layout=(16, 16)) makes it and its kernels view it as (N/16, K*16); N is a multiple of 16, K of
32. w_scale is fp32 row-major [ceil(N/128), ceil(K/128)], one for a 128 x 128 tile, not shuffled. Accumulation is fp32,
out is bf16, fp16 or fp32. Kernels and launches are a8w8_blockscale's and gemmpipe/templates/small_m.py's; this module
has what differs. The layout is in gemmpipe/family/layouts.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gemmpipe.core.data import Device, Knobs, Problem, Scalar
from gemmpipe.family import Family, GemmSpec, KernelDefaults, KeyColumn, bytes_moved, flops
from gemmpipe.family.aiter_table import RESULT_COLUMNS, AiterTable
from gemmpipe.family.dtypes import X_SCALE_COLUMN, reject_bias
from gemmpipe.family.layouts import TILES_16X16, check_preshuffle_shape
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.reference import product, tolerance
from gemmpipe.kernels import a8w8_blockscale as row_major
from gemmpipe.kernels.a8w8_blockscale import _gluon
from gemmpipe.kernels.a8w8_blockscale._gluon import BlockscaleWarpSpecialised
from gemmpipe.templates.small_m import SkinnyPreshuffled


def key_defaults(kernel: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    """Defaults of the key: the architecture's fp8 format, bf16 out. Raises UserError."""
    reject_bias(kernel, "a8w8_blockscale_bpreshuffle")
    return row_major.key_defaults(kernel, gfx)


def spec(problem: Problem) -> GemmSpec:
    """The product of a key. Raises UserError for a type or a size that the kernels or the layout do not support."""
    found = replace(row_major.spec(problem), w_layout=TILES_16X16)
    check_preshuffle_shape(problem.id, found.n, found.k)
    return found


@dataclass(frozen=True, kw_only=True)
class BlockscalePreshuffled(row_major.Blockscale):
    """`triton`: one program per tile and split."""

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """The row-major kernel's rules, for the other layout."""
        return _gluon.unsupported_reason(spec, knobs, device, layout=TILES_16X16)


FAMILY = Family(
    name="a8w8_blockscale_bpreshuffle",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="dtype", kind="dtype", default="float8_e4m3fn", aliases=("q_dtype_w",)),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
        X_SCALE_COLUMN,
    ),
    csv_name="a8w8_blockscale_bpreshuffle_tuned_gemm.csv",
    aiter_table=AiterTable(
        columns=("M", "N", "K", "libtype", *RESULT_COLUMNS), variable="GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE"
    ),
    json_tag="A8W8_BLOCKSCALE_PRESHUFFLED",
    entry_point="gemm_a8w8_blockscale_bpreshuffle",
    key_defaults=key_defaults,
    spec=spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(BlockscalePreshuffled(), BlockscaleWarpSpecialised(layout=TILES_16X16), SkinnyPreshuffled()),
)
