"""Triton kernels against the reference, under Triton's interpreter."""

import pytest
from interpreter_process import INTERPRETED, Interpreter
from pairwise import SLOW

pytestmark = INTERPRETED

A16W16 = [
    {"mnk": [32, 64, 128], "knobs": [16, 32, 64, 1]},
    {"mnk": [33, 80, 333], "knobs": [16, 32, 64, 4], "bias": True, "out": "float32"},
    {"mnk": [33, 48, 272], "knobs": [32, 32, 64, 2], "dtype": "float16", "bias": True},
    {"mnk": [1, 48, 320], "knobs": [16, 32, 64, 8], "dtype": "float16", "out": "bfloat16"},
    {"mnk": [16, 48, 320], "knobs": [16, 32, 64, 2], "dtype": "float8_e4m3fn", "bias": True},
    {"mnk": [16, 48, 320], "knobs": [16, 16, 64, 2], "dtype": "float8_e4m3fnuz", "gfx": "gfx942", "out": "float16"},
    {"mnk": [5, 80, 320], "knobs": [16, 64, 64, 2], "swap": True, "bias": True},
    {"mnk": [1, 1, 16], "knobs": [16, 16, 32, 1], "dtype": "float16", "out": "float32"},
    {"mnk": [3, 77, 65], "knobs": [16, 32, 32, 1], "bias": True},
    {"mnk": [31, 65, 127], "knobs": [16, 32, 64, 2], "dtype": "float8_e4m3fn", "out": "float32", "swap": True},
]
BLOCKSCALE = [
    {"mnk": [32, 128, 256], "knobs": [16, 64, 128, 1]},
    {"mnk": [33, 160, 400], "knobs": [16, 64, 128, 3]},
    {"mnk": [5, 300, 333], "knobs": [16, 256, 32, 4], "out": "float32"},
    {"mnk": [1, 144, 512], "knobs": [16, 64, 64, 8], "out": "float16"},
    {"mnk": [16, 128, 256], "knobs": [16, 128, 128, 2], "gfx": "gfx942"},
    {"mnk": [5, 144, 400], "knobs": [16, 64, 128, 4], "swap": True},
    {"mnk": [33, 256, 256], "knobs": [16, 256, 64, 1], "swap": True},
    {"mnk": [1, 1, 16], "knobs": [16, 16, 32, 1], "gfx": "gfx942", "out": "float16"},
    {"mnk": [3, 129, 257], "knobs": [16, 128, 64, 2]},
]
SKINNY = {
    "a16w16": [
        {"mnk": [1, 20, 512], "knobs": [1, 4, 256, 1]},
        {"mnk": [5, 30, 272], "knobs": [4, 8, 128, 1], "bias": True, "out": "float32"},
        {"mnk": [8, 18, 272], "knobs": [4, 4, 64, 1], "dtype": "float8_e4m3fnuz", "gfx": "gfx942"},
        {"mnk": [3, 21, 65], "knobs": [2, 4, 64, 1], "dtype": "float16", "bias": True},
    ],
    "a8w8": [
        {"mnk": [2, 30, 272], "knobs": [2, 8, 128, 1], "dtype": "int8", "bias": True},
        {"mnk": [3, 18, 272], "knobs": [2, 4, 64, 1], "key": {"granularity": "tensor"}},
        {"mnk": [1, 1, 16], "knobs": [1, 4, 64, 1], "dtype": "float8_e4m3fnuz", "gfx": "gfx942", "out": "float32"},
    ],
    "a8w8_blockscale": [
        {"mnk": [1, 20, 512], "knobs": [1, 4, 256, 1]},
        {"mnk": [3, 140, 336], "knobs": [2, 8, 128, 1], "out": "float16"},
        {"mnk": [1, 7, 129], "knobs": [1, 4, 128, 1], "gfx": "gfx942", "out": "float32"},
    ],
    "a8w8_bpreshuffle": [
        {"mnk": [1, 48, 512], "knobs": [1, 8, 256, 1]},
        {"mnk": [5, 48, 288], "knobs": [4, 32, 128, 1], "bias": True, "out": "float32"},
        {"mnk": [3, 48, 288], "knobs": [2, 16, 64, 1], "dtype": "int8", "key": {"granularity": "tensor"}},
        {"mnk": [2, 16, 32], "knobs": [1, 16, 64, 1], "dtype": "float8_e4m3fnuz", "gfx": "gfx942"},
    ],
    "a8w8_blockscale_bpreshuffle": [
        {"mnk": [1, 144, 384], "knobs": [1, 16, 256, 1]},
        {"mnk": [5, 48, 288], "knobs": [4, 32, 64, 1], "out": "float16"},
        {"mnk": [2, 16, 160], "knobs": [2, 8, 32, 1], "gfx": "gfx942", "out": "float32"},
    ],
}
SHUFFLED = [
    {"mnk": [33, 160, 416], "knobs": [16, 64, 128, 3]},
    {"mnk": [5, 144, 352], "knobs": [16, 64, 64, 2], "out": "float32"},
]
ORDERS = ("rows", "columns", "padded", "padded_rows")
# Columns and the least tile of each form: rows of w on the wide side of the matrix instruction, or x's.
SLICED = {
    "a16w16": [
        {"mnk": [1, 80, 512], "knobs": [8, 16, 256, 1]},
        {"mnk": [5, 70, 272], "knobs": [16, 8, 128, 1], "bias": True, "out": "float32"},
        {"mnk": [33, 70, 272], "knobs": [16, 32, 128, 1], "dtype": "float8_e4m3fn", "out": "float16"},
        {"mnk": [3, 77, 65], "knobs": [8, 32, 64, 1], "dtype": "float16", "bias": True},
        {"mnk": [16, 1, 129], "knobs": [16, 16, 128, 1], "dtype": "float16", "out": "float32"},
    ],
    "a8w8": [
        {"mnk": [2, 70, 272], "knobs": [8, 16, 128, 1], "dtype": "int8", "bias": True},
        {"mnk": [3, 70, 320], "knobs": [16, 8, 256, 1], "key": {"granularity": "tensor"}},
        {"mnk": [17, 33, 600], "knobs": [32, 16, 512, 1], "dtype": "float8_e4m3fn", "out": "float32", "bias": True},
    ],
    "a8w8_blockscale": [
        {"mnk": [1, 144, 512], "knobs": [8, 16, 512, 1]},
        {"mnk": [3, 300, 464], "knobs": [16, 8, 256, 1], "out": "float16"},
        {"mnk": [5, 7, 129], "knobs": [8, 32, 512, 1], "out": "float32"},
        {"mnk": [16, 129, 1400], "knobs": [16, 128, 128, 1]},
        {"mnk": [33, 40, 640], "knobs": [32, 16, 512, 1]},
    ],
}
LINEAR = {
    "triton": [
        {"mnk": [32, 128, 256], "knobs": [16, 64, 128, 1]},
        {"mnk": [33, 160, 400], "knobs": [16, 64, 128, 3], "out": "float16"},
        {"mnk": [1, 144, 1088], "knobs": [16, 64, 64, 8]},
        {"mnk": [16, 128, 256], "knobs": [16, 128, 128, 2], "gfx": "gfx942"},
    ],
    "skinny": [{"mnk": [3, 140, 336], "knobs": [2, 8, 128, 1]}],
    "sliced": [{"mnk": [5, 7, 129], "knobs": [8, 32, 512, 1]}, {"mnk": [16, 129, 1400], "knobs": [16, 128, 128, 1]}],
    "fused": [
        {"mnk": [32, 128, 256], "knobs": [16, 64, 128, 1]},
        {"mnk": [33, 160, 400], "knobs": [16, 256, 128, 3], "out": "float16"},
        {"mnk": [5, 144, 400], "knobs": [16, 64, 128, 4], "swap": True},
        {"mnk": [1, 1, 16], "knobs": [16, 16, 128, 1], "gfx": "gfx942"},
    ],
    "fused_sliced": [
        {"mnk": [1, 144, 1152], "knobs": [1, 16, 512, 1]},
        {"mnk": [3, 70, 400], "knobs": [1, 32, 512, 1], "out": "float16", "spec": {"bias": True}},
        {"mnk": [3, 7, 129], "knobs": [8, 32, 512, 1]},
        {"mnk": [8, 129, 640], "knobs": [8, 64, 512, 1], "out": "float16"},
        {"mnk": [9, 40, 272], "knobs": [8, 16, 512, 1], "spec": {"bias": True}},
        {"mnk": [16, 130, 1024], "knobs": [16, 16, 512, 1]},
        {"mnk": [17, 33, 1400], "knobs": [16, 32, 512, 1]},
    ],
    "weight_only": [
        {"mnk": [32, 128, 256], "knobs": [16, 64, 128, 1]},
        {"mnk": [33, 160, 400], "knobs": [16, 256, 64, 3], "out": "float16"},
        {"mnk": [5, 144, 400], "knobs": [16, 64, 128, 4], "swap": True},
        {"mnk": [3, 129, 257], "knobs": [16, 128, 32, 2], "gfx": "gfx942"},
    ],
}
"""Cases of linear_fp8_blockscale, by label."""
LINEAR_ROW = {
    "triton": [{"mnk": [33, 160, 400], "knobs": [16, 64, 128, 3], "bias": True}],
    "skinny": [{"mnk": [3, 18, 272], "knobs": [2, 4, 64, 1], "gfx": "gfx942"}],
    "sliced": [{"mnk": [17, 33, 600], "knobs": [32, 16, 512, 1], "bias": True, "out": "float16"}],
    "weight_only": [
        {"mnk": [32, 128, 256], "knobs": [16, 64, 128, 1]},
        {"mnk": [33, 160, 400], "knobs": [16, 256, 64, 3], "out": "float16", "bias": True},
        {"mnk": [5, 144, 600], "knobs": [16, 64, 256, 2], "swap": True, "bias": True},
        {"mnk": [1, 1, 16], "knobs": [16, 16, 32, 1], "gfx": "gfx942"},
    ],
}
"""Cases of linear_fp8_row."""
CASES = [
    ("a16w16", A16W16),
    *(("linear_fp8_blockscale", [{**case, "label": label} for case in cases]) for label, cases in LINEAR.items()),
    *(("linear_fp8_row", [{**case, "label": label} for case in cases]) for label, cases in LINEAR_ROW.items()),
    ("a8w8_blockscale", BLOCKSCALE),
    *((family, [{**case, "label": "skinny"} for case in cases]) for family, cases in SKINNY.items()),
    *((family, [{**case, "label": "sliced"} for case in cases]) for family, cases in SLICED.items()),
    ("a8w8_blockscale_bpreshuffle", SHUFFLED),
]


@pytest.mark.parametrize(
    ("family", "cases"),
    [
        *((family, cases[1::3] or cases) for family, cases in CASES),  # those that tiles do not divide
        *(pytest.param(family, cases[::3] + cases[2::3], marks=SLOW) for family, cases in CASES if len(cases) > 1),
    ],
)
def test_matches_the_reference_on_odd_and_even_sizes(interpreter: Interpreter, family: str, cases: list[dict]) -> None:
    for case in cases:
        result = interpreter.run("kernel", {"family": family, **case})
        assert result["reason"] is None, case
        assert result["error"] == 0, case
        assert result["same"], f"two runs differ: {case}"
        assert (result["splits"] > 1) == (case["knobs"][3] > 1), case


ALWAYS = {
    ("a8w8_blockscale", "triton"): ("padded",),
    ("a8w8_blockscale", "skinny"): ("padded",),
    ("a8w8_blockscale", "sliced"): ("padded_rows",),
    ("a8w8_blockscale_bpreshuffle", "triton"): (),
    ("a8w8_blockscale_bpreshuffle", "skinny"): (),
}
KERNELS = [
    ("a8w8_blockscale", "triton", BLOCKSCALE[1:4] + BLOCKSCALE[5:9:3]),
    ("a8w8_blockscale", "skinny", SKINNY["a8w8_blockscale"]),
    ("a8w8_blockscale", "sliced", SLICED["a8w8_blockscale"][1:4]),
    ("a8w8_blockscale_bpreshuffle", "triton", SHUFFLED),
    ("a8w8_blockscale_bpreshuffle", "skinny", SKINNY["a8w8_blockscale_bpreshuffle"]),
]


# For each kernel always an order with a gap between its columns or rows: the others are these without NaN.
@pytest.mark.parametrize(
    ("family", "label", "cases", "scales"),
    [
        pytest.param(*kernel, order, marks=() if order in ALWAYS[kernel[:2]] else SLOW)
        for kernel in KERNELS
        for order in ORDERS
    ],
)
def test_block_scales_of_either_order_are_read_in_place(
    interpreter: Interpreter, family: str, label: str, cases: list[dict], scales: str
) -> None:
    """Every Triton kernel of the block-scaled families; with NaN between columns and between rows."""
    laid = [{**case, "label": label, "scales": scales} for case in cases]
    test_matches_the_reference_on_odd_and_even_sizes(interpreter, family, laid)
