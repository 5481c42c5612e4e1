"""TunableOp's result files as rows of a tuned table."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmpipe.cli.main import main
from gemmpipe.core.data import Device
from gemmpipe.core.device import arch_device, gpu_kind
from gemmpipe.core.errors import UserError
from gemmpipe.family import load_family
from gemmpipe.tables import store
from gemmpipe.tables.tunableop import ImportedResults, is_results, read_results

ROCM = """Validator,PT_VERSION,2.11.0
Validator,HIP_VERSION,70051831
Validator,GCN_ARCH_NAME,gfx942:sramecc+:xnack-
Validator,ROCBLAS_VERSION,5.0.0.70051831-ab1c2d3
Validator,HIPBLASLT_VERSION,100101-43ab6c1
GemmTunableOp_BFloat16_TN,tn_6144_7_4096_ld_4096_4096_6144,Gemm_Hipblaslt_21434,0.0123
GemmTunableOp_BFloat16_TN,tn_1280_64_8192,Default,0.0098
GemmTunableOp_BFloat16_TN,tn_1280_32_8192_ld_8192_8192_1280,Gemm_Rocblas_4532,0.0098
GemmTunableOp_BFloat16_NN,nn_6144_7_4096_ld_6144_4096_6144,Gemm_Hipblaslt_3,0.1
GemmTunableOp_BFloat16_TN,tn_6144_8_4096_ld_8192_4096_6144,Gemm_Hipblaslt_3,0.1
GemmTunableOp_float_TN,tn_6144_7_4096_ld_4096_4096_6144,Gemm_Hipblaslt_4,0.1
GemmAndBiasTunableOp_Half_TN,tn_1280_16_8192_ld_8192_8192_1280,Gemm_Hipblaslt_77,0.02
GemmStridedBatchedTunableOp_BFloat16_TN,tn_512_16_128_B_8_ld_128_128_512,Gemm_Hipblaslt_5,0.03
ScaledGemmTunableOp_Float8_e4m3fnuz_Float8_e4m3fnuz_BFloat16_TN,tn_1280_16_8192_ld_8192_8192_1280_rw_1_bias_None,Gemm_Hipblaslt_9,0.004
ScaledGemmTunableOp_Float8_e4m3fnuz_Float8_e4m3fnuz_BFloat16_TN,tn_1280_16_8192_ld_8192_8192_1280_rw_0_bias_None,Default,0.005
ScaledGemmTunableOp_Float8_e4m3fnuz_Float8_e4m3fnuz_BFloat16_TN,tn_1280_17_8192_ld_8192_8192_1280_rw_0_bias_BFloat16,Default
GemmTunableOp_BFloat16_TN,tn_6144_7_4096_ld_4096_4096_6144,Gemm_Hipblaslt_21435,0.0113
"""
CUDA = """Validator,PT_VERSION,2.15.0
Validator,CUBLASLT_VERSION,130100
GemmTunableOp_BFloat16_TN,tn_1280_64_8192_ld_8192_8192_1280,Gemm_Cublaslt_id_66_tile_20_stages_36_splitk_2_red_1_swizzle_0_custom_3_inner_0_cluster_2,0.0071
GemmTunableOp_BFloat16_TN,tn_1280_*_8192_ld_8192_8192_1280,Default,0.0071
ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_1280_64_8192_ld_8192_8192_1280_a_0_b_0_c_1_as_0_bs_0_ast_1_bst_1_dscale_0_fast_0_bias_None,Default,0.005
"""


@pytest.fixture
def mi300x() -> Device:
    return arch_device("gfx942")


def _read(text: str, family: str, device: Device, tmp_path: Path) -> ImportedResults:
    path = tmp_path / "tunableop_results0.csv"
    path.write_text(text)
    assert is_results(path)
    return read_results(path, load_family(family), device)


def _short(found: ImportedResults) -> list[tuple[object, ...]]:
    return [(r["M"], r["N"], r["K"], r["libtype"], json.loads(str(r["config"])), r["us"]) for r in found.rows]


def test_sixteen_bits(tmp_path: Path, mi300x: Device) -> None:
    found = _read(ROCM, "a16w16", mi300x, tmp_path)
    assert _short(found) == [
        (7, 6144, 4096, "hipblaslt", {"solidx": 21435}, 11.3),
        (64, 1280, 8192, "torch", {"method": "mm"}, 9.8),
        (16, 1280, 8192, "hipblaslt", {"solidx": 77}, 20.0),
        (16, 1280, 8192, "scaled_mm", {"use_fast_accum": False}, 5.0),
        (17, 1280, 8192, "scaled_mm", {"use_fast_accum": False}, None),
    ]
    first, _, biased, scaled, last = found.rows
    assert (first["gfx"], first["cu_num"], first["dtype"], first["bias"]) == ("gfx942", 304, "bfloat16", False)
    assert (first["solidx"], first["kernelName"]) == (21435, "hipblaslt_21435@100101-43ab6c1")
    assert (biased["dtype"], biased["outdtype"], biased["bias"]) == ("float16", "float16", True)
    assert (scaled["dtype"], scaled["outdtype"], scaled["scaleAB"]) == ("float8_e4m3fnuz", "bfloat16", True)
    assert last["bias"] is True
    assert found.left_out == {
        "a solution of Rocblas, which no backend here offers": 1,
        "operands stored as NN, not x [M, K] and w [N, K]": 1,
        "rows that are not contiguous": 1,
        "no product of a16w16": 3,
    }


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("a8w8", {"granularity": "row", "q_dtype_w": "float8_e4m3fnuz", "solidx": 9}),
        ("batched_bf16", {"B": 8, "M": 16, "N": 512, "solidx": 5}),
    ],
)
def test_other_families(family: str, expected: dict[str, object], tmp_path: Path, mi300x: Device) -> None:
    found = _read(ROCM, family, mi300x, tmp_path)
    assert {k: v for k, v in found.rows[0].items() if k in expected} == expected


def test_cublaslts_algorithms(tmp_path: Path, h200: Device) -> None:
    (row,) = _read(CUDA, "a16w16", h200, tmp_path).rows
    assert row["libtype"] == "cublaslt"
    assert json.loads(str(row["config"])) == {
        "algo_id": 66,
        "tile_id": 20,
        "stages_id": 36,
        "NUM_KSPLIT": 2,
        "reduction_scheme": 1,
        "cta_swizzling": 0,
        "custom_option": 3,
        "inner_shape_id": 0,
        "cluster_shape_id": 2,
    }
    assert (row["splitK"], row["kernelName"], row["us"]) == (2, "cublaslt_66@130100", 7.1)
    (scaled,) = _read(CUDA, "a8w8", h200, tmp_path).rows
    assert (scaled["libtype"], scaled["granularity"]) == ("scaled_mm", "row")
    without = _read(CUDA.replace("CUBLASLT_VERSION", "OTHER"), "a16w16", h200, tmp_path)
    assert without.rows == []
    assert without.left_out["cuBLASLt's algorithm without CUBLASLT_VERSION, which defines it"] == 1


def test_what_is_read_is_a_native_table(tmp_path: Path, mi300x: Device) -> None:
    family = load_family("a16w16")
    found = _read(ROCM, "a16w16", mi300x, tmp_path)
    path = tmp_path / family.csv_name
    path.write_text(store.render(found.rows, family, ()))
    table = store.load(path, family)
    assert [*table.rows, *(row for row, _ in table.refused)] == found.rows
    assert len(table.refused) == 1, "the one without a time cannot win"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Validator,PT_VERSION\n", "csv:1: 2 cells, expected Validator,NAME,VALUE"),
        (ROCM + "GemmTunableOp_BFloat16_TN\n", "csv:18: 1 cells, expected a product"),
        (ROCM + "GemmTunableOp_BFloat16,tn_1_2_3,Default,1\n", "csv:18: 'GemmTunableOp_BFloat16,tn_1_2_3', expected"),
        (ROCM + "GemmTunableOp_BFloat16_TN,1x2x3,Default,1\n", "csv:18: .*expected a product such as"),
        (ROCM + "GemmTunableOp_BFloat16_TN,tn_1_2_3,Default,fast\n", "csv:18: time 'fast', expected milliseconds"),
        (ROCM.replace("gfx942", "gfx950"), "tuned on gfx950, the device is gfx942"),
    ],
)
def test_broken_files(text: str, line: str, tmp_path: Path, mi300x: Device) -> None:
    path = tmp_path / "r.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=line) as caught:
        read_results(path, load_family("a16w16"), mi300x)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("own_locks")
def test_they_are_inputs_of_a_merge(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = "\n".join(line for line in ROCM.splitlines() if "Float8" not in line)
    (folder / "tunableop_results0.csv").write_text(plain + "\n")
    arguments = ["merge", "kernel=a16w16", "inputs=[tunableop_results0.csv]", "output=out"]
    assert main([*arguments, "target=[gfx942]"]) == 0
    rows = store.read(folder / "out" / "bf16_tuned_gemm.csv", load_family("a16w16"))
    assert {(row["M"], row["gfx"], row["cu_num"], row["libtype"], row["us"], row["policy"]) for row in rows} == {
        (7, "gfx942", 304, "hipblaslt", 11.3, "tunableop"),
        (16, "gfx942", 304, "hipblaslt", 20.0, "tunableop"),
        (64, "gfx942", 304, "torch", 9.8, "tunableop"),
    }
    message = capsys.readouterr().out
    assert "load: tunableop_results0.csv: 1 left out: a solution of Rocblas, which no backend here offers" in message


@pytest.mark.usefixtures("own_locks")
@pytest.mark.skipif(gpu_kind() is not None, reason="a GPU is what such files are for")
def test_where_there_is_no_gpu(folder: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]) -> None:
    (folder / "rocm.csv").write_text("\n".join(line for line in ROCM.splitlines() if "Float8" not in line) + "\n")
    (folder / "cuda.csv").write_text(CUDA)
    assert main(["merge", "kernel=a16w16", "inputs=[rocm.csv]", "output=out"]) == 0
    assert "load: rocm.csv: assumed to be tuned on AMD Instinct MI300X, 304 units of gfx942" in capsys.readouterr().out
    table = folder / "out" / "bf16_tuned_gemm.csv"
    assert {row["gfx"] for row in store.read(table, load_family("a16w16"))} == {"gfx942"}
    message = refusal("merge", "kernel=a16w16", "inputs=[cuda.csv]", "output=out")
    assert message == "cuda.csv: no GPU here or in the file; expected the one that it was tuned on: target=sm_90"
    assert "target: sm_90, gfx942; expected the one" in refusal(
        "merge", "kernel=a16w16", "inputs=[cuda.csv]", "target=[sm_90,gfx942]"
    )
    assert "target: given; expected for TunableOp's" in refusal("merge", f"inputs=[{table}]", "target=[sm_90]")
    assert main(["merge", "kernel=a16w16", "inputs=[cuda.csv]", "output=cuda", "target=[sm_90]"]) == 0
    assert "load: cuda.csv: 1 row (1 sm_90/132)" in capsys.readouterr().out


def test_what_is_no_result_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("gfx,cu_num,M,N,K,us\n")
    assert not is_results(path)
    assert not is_results(tmp_path / "absent.csv")
    path.write_text("GemmTunableOp_Half_TN,tn_1_2_3\n")
    assert not is_results(path), "a file of untuned products"


@settings(max_examples=100)
@given(place=st.floats(0, 1, exclude_max=True), byte=st.sampled_from(b' ,"\n0159xTN_*.-\x00\xff'))
def test_a_changed_byte_is_refused_or_changes_one_row(
    tmp_path_factory: pytest.TempPathFactory, place: float, byte: int
) -> None:
    device, family = arch_device("gfx942"), load_family("a16w16")
    folder = tmp_path_factory.mktemp("tunableop")
    before = _read(ROCM, "a16w16", device, folder).rows
    raw = bytearray(ROCM.encode())
    start = raw.index(b"Gemm")
    raw[start + int(place * (len(raw) - 1 - start))] = byte
    (folder / "r.csv").write_bytes(bytes(raw))
    try:
        after = read_results(folder / "r.csv", family, device).rows
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    # The product with two lines may become two products.
    assert len([row for row in before if row not in after]) <= 1
    assert len([row for row in after if row not in before]) <= 2
