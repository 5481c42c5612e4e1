"""out[M, N] = (x[M, K] * x_scale) @ (w[N, K] * w_scale)^T for MXFP4 operands (OCP microscaling).

x is [M, K/2] and w [N, K/2], row-major, torch.float4_e2m1fn_x2: two e2m1 values (0 .5 1 1.5 2 3 4 6 and their
negatives) a byte along K, the low nibble the even k. x_scale is [M, K/32] and w_scale [N, K/32], row-major,
torch.float8_e8m0fnu: byte b scales 32 elements along K by 2**(b - 127). This is aiter's gemm_afp4wfp4 (uint8 there);
its asm kernels' a4w4 tables, keyed M N K with K in elements, are for shuffled weights and scales. Accumulation is fp32,
out is bf16, fp16 or fp32; K is a multiple of 32. Chips without such instructions multiply decoded bf16, which holds
every product of value and scale exactly. Read on in _kernel.py (device functions), _triton.py (launch, builds and what
fits where), _problem.py (keys).
"""

from gemmpipe.cost import bytes_moved, flops
from gemmpipe.family import Family, KeyColumn
from gemmpipe.kernels.a4w4_blockscale import _problem
from gemmpipe.kernels.a4w4_blockscale._triton import Microscaled
from gemmpipe.operands import make_inputs, make_weights
from gemmpipe.reference import product, tolerance
from gemmpipe.tables.aiter import PLAIN, AiterTable

FAMILY = Family(
    name="a4w4_blockscale",
    key_columns=(
        KeyColumn(name="M", kind="int"),
        KeyColumn(name="N", kind="int"),
        KeyColumn(name="K", kind="int"),
        KeyColumn(name="outdtype", kind="dtype", default="bfloat16"),
    ),
    csv_name="a4w4_blockscale_tuned_gemm.csv",
    aiter_table=AiterTable(columns=("M", "N", "K", *PLAIN), powers=("", "ck", "cktile", "asm"), variable="GEMM_A4W4"),
    json_tag="AFP4WFP4",
    entry_point="gemm_a4w4_blockscale",
    key_defaults=_problem.key_defaults,
    spec=_problem.spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(Microscaled(),),
)
