"""TunableOp's files, untuned and results, of old and new versions."""

from pathlib import Path

import pytest

from gemmpipe.core.data import Problem
from gemmpipe.core.errors import UserError
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.sources.records import TunableopShapes

NOTHING = KernelDefaults(dtype=None, out_dtype=None, bias=None)
FILE = """\
Validator,PT_VERSION,2.13.0
GemmTunableOp_BFloat16_TN,tn_6144_7_4096_ld_4096_4096_6144
GemmTunableOp_Half_NN,nn_512_3_1024,Gemm_Hipblaslt_6849,0.2
GemmAndBiasTunableOp_BFloat16_TN,tn_6144_7_4096_ld_4096_4096_6144,"BLAS_PARAMS: - { function: matmul, M: 6144 }"
GemmTunableOp_float_TN,tn_64_7_128_ld_128_128_64
GemmStridedBatchedTunableOp_BFloat16_TN,tn_128_5_64_B_16_ld_64_64_128
ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_64_12_2048_ld_2048_2048_64_rw_1_bias_None
ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_64_12_2048_ld_2048_2048_64_rw_0_bias_Half
ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_64_12_2048_ld_2048_2048_64_a_0_b_0_ast_4_bst_5_bias_None
"""


def made(folder: Path, family: str, text: str = FILE) -> list[Problem]:
    (folder / "tunableop_untuned0.csv").write_text(text)
    source = TunableopShapes(path=f"{folder}/tunableop_untuned?.csv", rows_of=None)
    return source.problems(load_family(family), NOTHING, "sm_90")


def test_column_major_sizes_are_ours_the_other_way_round(tmp_path: Path) -> None:
    found = [tuple(p[name] for name in ("M", "N", "K", "bias", "dtype")) for p in made(tmp_path, "a16w16")]
    assert found == [
        (7, 6144, 4096, False, "bfloat16"),
        (3, 512, 1024, False, "float16"),
        (7, 6144, 4096, True, "bfloat16"),
    ]


def test_batched_and_scaled(tmp_path: Path) -> None:
    assert [tuple(v for _, v in p.key)[:4] for p in made(tmp_path, "batched_bf16")] == [(16, 5, 128, 64)]
    eight = [(p["M"], p["N"], p["granularity"], p["bias"]) for p in made(tmp_path, "a8w8")]
    assert eight == [(12, 64, "row", False), (12, 64, "tensor", True)]
    assert [(p["M"], p["N"], p["K"]) for p in made(tmp_path, "a8w8_blockscale")] == [(12, 64, 2048)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "GemmTunableOp_BFloat16_TN\n",
            "untuned0.csv:1: 'GemmTunableOp_BFloat16_TN', expected an operator's signature",
        ),
        ("GemTunableOp_BFloat16_TN,tn_1_2_3\n", "expected Gemm or GemmAndBias"),
        ("GemmTunableOp_BFloat16_TN,nt_1_2_3\n", "'nt_1_2_3', expected sizes such as tn_6144"),
        ("GemmTunableOp_BFloat16_TN,tn_64_2_32_ld_16_32_64\n", "lda 16, expected at least 32"),
        ("GemmTunableOp_BFloat16_TN,tn_64_2_32_B_4\n", "expected _B_ for batched products"),
        ("GemmTunableOp_BFloat17_TN,tn_64_2_32\n", "'GemmTunableOp_BFloat17_TN', expected Gemm or"),
        ("GemmTunableOp_BFloat16_TN,tn_0_2_32\n", "column N: 0, expected a whole number"),
        ("GemmTunableOp_double_TN,tn_1_2_32\n", "no product of a16w16 found, but 1 of other"),
    ],
)
def test_errors_are_one_line(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=line) as caught:
        made(tmp_path, "a16w16", text)
    assert "\n" not in str(caught.value)
