"""out[M, N] = (x[M, K] * x_scale) @ (w[N, K] * w_scale)^T for fp8 operands with a scale for every block along K.

x and w are e4m3fn (e4m3fnuz on gfx942), row-major with K innermost. x_scale is fp32 [M, ceil(K/128)], one for 128
elements of a row; w_scale is fp32 [ceil(N/128), ceil(K/128)], one for a 128 x 128 tile. Accumulation is fp32, out is
bf16, fp16 or fp32; N and K may be ragged. Read on in _kernel.py, _warp_specialised.py and _columns.py (device
functions), _triton.py and _gluon.py (launch and builds), _engine_kernel.py and _engine.py (the form that vLLM's and
SGLang's kernels have, for their files of configurations), _fits.py (what fits where), _problem.py (keys and operands),
and for few rows gemmpipe/templates/ (skinny.py, sliced.py).
"""

from gemmpipe.cost import bytes_moved, flops
from gemmpipe.family import Family, KeyColumn
from gemmpipe.kernels.a8w8_blockscale import _problem
from gemmpipe.kernels.a8w8_blockscale._engine import BlockscaleOfEngine
from gemmpipe.kernels.a8w8_blockscale._gluon import BlockscaleWarpSpecialised
from gemmpipe.kernels.a8w8_blockscale._triton import Blockscale
from gemmpipe.operand_types import X_SCALE
from gemmpipe.operands import make_inputs, make_weights
from gemmpipe.reference import product, tolerance
from gemmpipe.tables.aiter import PLAIN, AiterTable
from gemmpipe.templates.skinny import Skinny
from gemmpipe.templates.sliced import Sliced

FAMILY = Family(
    name="a8w8_blockscale",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="dtype", kind="dtype", default="float8_e4m3fn", aliases=("q_dtype_w",)),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
        X_SCALE,
    ),
    csv_name="a8w8_blockscale_tuned_gemm.csv",
    aiter_table=AiterTable(columns=("M", "N", "K", "libtype", *PLAIN), variable="GEMM_A8W8_BLOCKSCALE"),
    json_tag="A8W8_BLOCKSCALE",
    entry_point="gemm_a8w8_blockscale",
    key_defaults=_problem.key_defaults,
    spec=_problem.spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("scaled_mm", "torch"),
    implementations=(Blockscale(), BlockscaleWarpSpecialised(), Skinny(), Sliced()),
    engine_kernels={
        "vllm": BlockscaleOfEngine(label="vllm", stepped=False, masks_always=True),
        "sglang": BlockscaleOfEngine(label="sglang", stepped=True, masks_always=False),
    },
)
