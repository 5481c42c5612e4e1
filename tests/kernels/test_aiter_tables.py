"""aiter's tables of every GEMM family, in every header that aiter has published, tuned and untuned."""

from pathlib import Path

import pytest

from gemmpipe.core.errors import UserError
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.aiter_table import render
from gemmpipe.sources.table import CsvShapes
from gemmpipe.tables import store

RESULT = "us,kernelName,tflops,bw,errRatio"
TUNED = {
    # header, row, key without M, (libtype, solidx, splitK as a literal count)
    "T1": (
        "a4w4_blockscale",
        f"gfx,cu_num,M,N,K,kernelId,splitK,{RESULT}",
        "gfx950,256,1,512,4096,21,0,5.4049,_ZN5aiter41f4gemm_bf16_per1x32Fp4_BpreShuffle_32x128E,0.78,194.57,0.0",
        (None, 21, 1),
    ),
    "T1 split": (
        "a4w4_blockscale",
        f"gfx,cu_num,M,N,K,kernelId,splitK,{RESULT}",
        "gfx950,256,1,512,4096,21,3,5.4049,_ZN5aiter41f4gemm_bf16_per1x32Fp4_BpreShuffle_32x128E,0.78,194.57,0.0",
        (None, 21, 8),
    ),
    "T2": (
        "a8w8_blockscale",
        f"gfx,cu_num,M,N,K,libtype,kernelId,splitK,{RESULT}",
        "gfx942,304,1,3072,1536,ck,8,2,6.6154,a8w8_blockscale_1x128x128_256x16x64x256,1.43,714.43,0.0",
        ("ck", 8, 4),
    ),
    "T2 asm": (
        "a8w8_blockscale_bpreshuffle",
        f"gfx,cu_num,M,N,K,libtype,kernelId,splitK,{RESULT}",
        "gfx950,256,16,512,7168,asm,6,7,7.9691,_ZN5aiter42fp8gemm_bf16_blockscale_BpreShuffle_32x128E,14,476.98,0.0029",
        ("asm", 6, 7),
    ),
    "T2 by hand": (
        "a8w8_blockscale_bpreshuffle",
        f"gfx,cu_num,M,N,K,libtype,kernelId,splitK,{RESULT}",
        "gfx942,80,1,1536,4096,triton,0,0,7.780,triton,0,0,0.0",
        ("triton", 0, 1),
    ),
    "T3": (
        "a8w8_bpreshuffle",
        f"gfx,cu_num,M,N,K,q_dtype_w,libtype,kernelId,splitK,{RESULT}",
        "gfx942,80,128,128,5120,torch.int8,asm,0,8,7.3189,_ZN5aiter41I8gemm_bf16_perTokenI8_BpreShuffle_16x128E,22,183,0.18",
        ("asm", 0, 8),
    ),
    "T4": (
        "a8w8",
        f"gfx,cu_num,M,N,K,q_dtype_w,kernelId,splitK,{RESULT}",
        "gfx942,80,1,1280,8192,torch.int8,34,1,20.5611,a8w8_rowwise_256x16x64x512_16x16_1x1,1.02,510.5,0.0",
        (None, 34, 2),
    ),
    "T5": (
        "batched_bf16",
        f"gfx,cu_num,B,M,N,K,kernelId,splitK,{RESULT}",
        "gfx942,304,16,1,1280,8192,78,0,111.9323,bf16_batched_64x16x16x64_interwave_v2,3.0,3000.45,0.0",
        (None, 78, 1),
    ),
    "T5 a8w8": (
        "batched_a8w8",
        f"gfx,cu_num,B,M,N,K,kernelId,splitK,{RESULT}",
        "gfx942,304,16,32,1280,8192,28,0,68.9821,a8w8_batched_rowwise_256x32x128x256_v3,155.6551,5004.8295,0.0",
        (None, 28, 1),
    ),
    "T6": (
        "a16w16",
        "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw",
        "gfx950,256,64,256,5120,False,torch.bfloat16,torch.float32,False,False,asm,5,13,7.9191,_ZN5aiter39bf16gemmE,0.0,21,417",
        ("asm", 5, 13),
    ),
    "T6 skinny": (
        "a16w16",
        "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw",
        "gfx950,256,1,256,7168,False,torch.bfloat16,torch.bfloat16,False,False,skinny,2,0,5.2154,sol2,0.0,0.7,706.54",
        ("skinny", 2, 1),
    ),
}


@pytest.mark.parametrize("name", TUNED)
def test_a_tuned_table_is_read(name: str, tmp_path: Path) -> None:
    family, header, line, expected = TUNED[name]
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n{line}\n")
    (row,) = store.read(path, load_family(family))
    cells = dict(zip(header.split(","), line.split(","), strict=True))
    assert (row.get("libtype"), row["solidx"], row["splitK"]) == expected
    for column in ("gfx", "kernelName"):
        assert row[column] == cells[column]
    for column in ("B", "M", "N", "K", "cu_num"):
        assert row.get(column) == (int(cells[column]) if column in cells else None)
    for column in ("us", "tflops", "bw"):
        assert row[column] == float(cells[column])
    assert row["err_ratio"] == float(cells.get("errRatio") or cells.get("err_ratio") or 0)
    assert all((row[column.name] is None) == column.optional for column in load_family(family).key_columns)


def test_what_a_table_implies_is_read_and_written(tmp_path: Path) -> None:
    name, header, line, _ = TUNED["T5 a8w8"]
    family, path = load_family(name), tmp_path / "t.csv"
    path.write_text(f"{header}\n{line}\n")
    (row,) = store.read(path, family)
    assert row["dtype"] == "int8"
    assert family.aiter_table is not None
    written = render([row], family.aiter_table, ()).splitlines()
    assert written[0] == header
    assert [float(a) if a[:1].isdigit() else a for a in written[1].split(",")] == [
        float(a) if a[:1].isdigit() else a for a in line.split(",")
    ]


def test_a_row_that_lacks_cells_of_other_programs_alone_is_read(tmp_path: Path) -> None:
    """As pandas reads it: some of aiter's tables of experts lack the last cell, `_tag`."""
    name, header, line, _ = TUNED["T4"]
    path = tmp_path / "t.csv"
    path.write_text(f"{header},_tag,other\n{line},x,y\n{line.replace('34,1', '35,1')},x\n")
    first, second = store.read(path, load_family(name))
    assert (first["_tag"], second["_tag"], second["other"], second["solidx"]) == ("x", "x", None, 35)
    path.write_text(f"{header},_tag\n{line.replace('34,1', '341')},\n")  # a lost comma
    with pytest.raises(UserError, match="13 cells, expected 14 as in the header"):
        store.read(path, load_family(name))
    path.write_text(f"{header}\n{line.rpartition(',')[0]}\n")
    with pytest.raises(UserError, match="12 cells, expected 13 as in the header"):
        store.read(path, load_family(name))


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("variant", ["no gfx", "blanks", "lower case", "no kernelId", "no splitK", "no libtype", "BOM"])
def test_variants_of_a_tuned_table(name: str, variant: str, tmp_path: Path) -> None:
    family, header, line, _ = TUNED[name]
    path, sound = tmp_path / "t.csv", tmp_path / "sound.csv"
    sound.write_text(f"{header}\n{line}\n")
    (expected,) = store.read(sound, load_family(family))
    lost = {"no gfx": "gfx", "no kernelId": "kernelId", "no splitK": "splitK", "no libtype": "libtype"}.get(variant)
    names, cells = header.split(","), line.split(",")
    if lost == "kernelId" and lost not in names:
        lost = "solidx"
    kept = [i for i, column in enumerate(names) if column != lost]
    blank = ", " if variant == "blanks" else ","
    text = "\n".join(blank.join(fields[i] for i in kept) for fields in (names, cells)) + "\n"
    if variant == "lower case":
        head, rest = text.split("\n", 1)
        text = f"{head.lower()}\n{rest}"
    path.write_text(text, encoding="utf-8-sig" if variant == "BOM" else "utf-8")
    (row,) = store.read(path, load_family(family))
    kept_values = {k: v for k, v in expected.items() if k not in (lost, "solidx" if lost == "kernelId" else lost)}
    if lost == "libtype":
        kept_values.pop("splitK")  # its meaning depends on the library
    assert {k: row.get(k) for k in kept_values} == kept_values


UNTUNED = {
    "three": ("M,N,K", "16, 1536, 7168"),
    "quantised": ("M,N,K,q_dtype_w", "1,1280,8192,torch.int8"),
    "fp8": ("M, N, K, q_dtype_w", "1, 1280, 8192, torch.float8_e4m3fnuz"),
    "batched": ("B,M,N,K", "16,1,1280,8192"),
    "bf16": (
        "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle",
        "64,256,5120,False,torch.bfloat16,torch.float32,False,False",
    ),
    "shouting": (
        "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle",
        "64,256,5120,TRUE,torch.bfloat16,torch.bfloat16,FALSE,FALSE",
    ),
    "without bpreshuffle": (
        "M,N,K,bias,dtype,outdtype,scaleAB",
        "64,256,5120,False,torch.bfloat16,torch.bfloat16,False",
    ),
}
FITTING = {
    "a16w16": ("three", "bf16", "shouting", "without bpreshuffle"),
    "a8w8": ("three", "quantised", "fp8"),
    "a8w8_bpreshuffle": ("three", "quantised", "fp8"),
    "a8w8_blockscale": ("three", "fp8"),
    "a8w8_blockscale_bpreshuffle": ("three", "fp8"),
    "a4w4_blockscale": ("three",),
    "a16w16_atomic": ("three",),
    "batched_bf16": ("batched",),
    "batched_a8w8": ("batched",),
}
NO_WORDS = KernelDefaults(dtype=None, out_dtype=None, bias=None)


@pytest.mark.parametrize(("family", "variant"), [(f, v) for f, variants in FITTING.items() for v in variants])
def test_an_untuned_table_is_read(family: str, variant: str, tmp_path: Path) -> None:
    header, line = UNTUNED[variant]
    path = tmp_path / "untuned.csv"
    path.write_text(f"{header}\n{line}\n\n")
    (problem,) = CsvShapes(path=str(path), rows_of=None).problems(load_family(family), NO_WORDS, "gfx942")
    cells = dict(zip((w.strip() for w in header.split(",")), (w.strip() for w in line.split(",")), strict=True))
    for column in ("B", "M", "N", "K"):
        if column in cells:
            assert problem[column] == int(cells[column])
    for column in ("bias", "scaleAB", "bpreshuffle"):
        if column in cells:
            assert problem[column] is (cells[column].lower() == "true")
    for column in ("dtype", "outdtype"):
        if column in cells:
            assert f"torch.{problem[column]}" == cells[column]
    if "q_dtype_w" in cells:
        quantised = dict(problem.key).get("q_dtype_w") or problem["dtype"]
        assert f"torch.{quantised}" == cells["q_dtype_w"]
    load_family(family).spec(problem)


def test_a_row_that_has_no_time_of_aiters_placeholders_cannot_win(tmp_path: Path) -> None:
    _, header, line, _ = TUNED["T6"]
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n{line.replace('7.9191', '0')}\n{line}\n")
    table = store.load(path, load_family("a16w16"))
    assert [row["us"] for row in table.rows] == [7.9191]
    assert len(table.refused) == 1


def test_an_old_table_without_architecture_is_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "asm_a8w8_gemm.csv"
    path.write_text("M,N,K,bias,outdtype,splitK,us\n1,1280,8192,False,torch.bfloat16,2,9.5\n")
    with pytest.raises(
        UserError, match=r"asm_a8w8_gemm.csv:2: no gfx, and not known from cu_num None; add a column gfx"
    ):
        store.read(path, load_family("a8w8"))
    (problem,) = CsvShapes(path=str(path), rows_of=None).problems(load_family("a8w8"), NO_WORDS, "gfx942")
    assert (problem["M"], problem["bias"]) == (1, False)


DATA = Path(__file__).parents[3] / "shared" / "data" / "aiter"
COLLECTED = {
    "a8w8_blockscale_tuned_gemm.head40.csv": "a8w8_blockscale",
    "a8w8_blockscale_tuned_gemm_ds_v3.gfx942_304.csv": "a8w8_blockscale",
    "a8w8_blockscale_bpreshuffle_tuned_gemm.head40.csv": "a8w8_blockscale_bpreshuffle",
    "bf16_tuned_gemm.head40.csv": "a16w16",
}


@pytest.mark.skipif(not DATA.exists(), reason="collected data of aiter not here")
@pytest.mark.parametrize("name", COLLECTED)
def test_a_collected_table_is_written_as_it_was(name: str) -> None:
    family = load_family(COLLECTED[name])
    rows = store.read(DATA / name, family)
    assert family.aiter_table is not None
    dtypes = [column.name for column in family.key_columns if column.kind == "dtype"]
    before = (DATA / name).read_text().splitlines()
    after = render(rows, family.aiter_table, dtypes).splitlines()
    assert after[0] == before[0]
    for old, new in zip(before[1:], after[1:], strict=True):
        cells = zip(old.split(","), new.split(","), strict=True)
        assert all(a == b or float(a) == float(b) for a, b in cells), (old, new)


@pytest.mark.skipif(not DATA.exists(), reason="collected data of aiter not here")
@pytest.mark.parametrize(
    ("name", "family", "rows_of"),
    [
        ("a4w4_blockscale_untuned_gemm.head40.csv", "a4w4_blockscale", None),
        ("a8w8_blockscale_untuned_gemm.head40.csv", "a8w8_blockscale", None),
        ("a8w8_blockscale_untuned_gemm.head40.csv", "a8w8_blockscale_bpreshuffle", "a8w8_blockscale"),
        ("bf16_untuned_gemm.head40.csv", "a16w16", None),
        *((name, family, None) for name, family in COLLECTED.items()),
    ],
)
def test_a_collected_table_gives_problems(name: str, family: str, rows_of: str | None) -> None:
    problems = CsvShapes(path=str(DATA / name), rows_of=rows_of).problems(load_family(family), NO_WORDS, "gfx950")
    lines = len([line for line in (DATA / name).read_text().splitlines() if line.strip()]) - 1
    assert sum(problem.weight for problem in problems) == lines
