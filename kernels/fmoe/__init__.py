"""Fused mixture of experts: out[M, N] = sum over a row's experts of weight * (act(x @ w1[e]^T) @ w2[e]^T).

x [token, model_dim] and out are bf16 or fp16; w1 is [expert, 2 * inter_dim, model_dim], the gate's rows before the up
projection's (h = act(gate) * up; without `use_g1u1` [expert, inter_dim, model_dim] and h = act(x @ w1^T)), w2
[expert, model_dim, inter_dim]. With fp8 weights x and h are quantised on the way: `per_Token` (a scale a row, weights
a scale a row [expert, rows, 1]) or `per_1x128` (weights 128 x 128). inter_dim is a rank's own share, expert the
experts that it holds. Read on in _kernel.py (device functions), _steps.py (the launches of a call), _triton.py (knobs,
what fits where), _problem.py (keys, those of aiter's untuned_fmoe); for rows sorted by expert on Hopper in _sorted.py
and _grouped.py (device functions), _grouped_steps.py and _grouped_tile.py (launches), _gluon.py.
"""

from gemmpipe.experts import bytes_moved, flops, make_inputs, make_weights, product, tolerance
from gemmpipe.family import Family, KeyColumn
from gemmpipe.kernels.fmoe import _problem, _table
from gemmpipe.kernels.fmoe._engine import ENGINES
from gemmpipe.kernels.fmoe._gluon import GroupedExperts
from gemmpipe.kernels.fmoe._triton import FusedExperts
from gemmpipe.tables.aiter import AiterTable

_KEY = (
    KeyColumn(name="token", kind="int", aliases=("tokens", "M")),
    KeyColumn(name="model_dim", kind="int"),
    KeyColumn(name="inter_dim", kind="int"),
    KeyColumn(name="expert", kind="int", aliases=("E",)),
    KeyColumn(name="topk", kind="int"),
    KeyColumn(name="act_type", kind="str", words=_problem.ACTIVATIONS, others=_problem.OTHER_ACTIVATIONS),
    KeyColumn(name="dtype", kind="dtype"),
    KeyColumn(name="q_dtype_a", kind="dtype"),
    KeyColumn(name="q_dtype_w", kind="dtype"),
    KeyColumn(name="q_type", kind="str", words=_problem.QUANTISATIONS, others=_problem.OTHER_QUANTISATIONS),
    KeyColumn(name="use_g1u1", kind="flag"),
    KeyColumn(name="doweight_stage1", kind="flag"),
)

FAMILY = Family(
    name="fmoe",
    key_columns=_KEY,
    csv_name="tuned_fmoe.csv",
    aiter_table=AiterTable(columns=(*(column.name for column in _KEY), *_table.COLUMNS, *_table.REST), variable="FMOE"),
    further_columns=_table.COLUMNS,
    further_cells=_table.cells,
    json_tag="FMOE",
    entry_point="fused_moe",
    key_defaults=_problem.key_defaults,
    spec=_problem.spec,
    make_weights=make_weights,
    make_inputs=make_inputs,
    reference=product,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    baseline=("torch",),
    implementations=(FusedExperts(), GroupedExperts()),
    engine_kernels=ENGINES,
    rows_column="token",
)
