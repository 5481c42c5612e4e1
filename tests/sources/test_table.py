"""Problems from real CSV tables."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from gemmpipe.core.errors import UserError
from gemmpipe.family import Family, KernelDefaults, load_family
from gemmpipe.sources.table import CsvShapes

read = functools.partial(CsvShapes, rows_of=None)

DATA = Path(__file__).parents[3] / "shared" / "data" / "aiter"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "shapes.csv"


def _sizes(path: object, family: Family, defaults: KernelDefaults) -> list[tuple[object, ...]]:
    made = read(path=path).problems(family, defaults, "sm_90")  # type: ignore[arg-type]
    return [(p["M"], p["N"], p["K"], p.weight) for p in made]


@pytest.mark.parametrize(
    "text",
    [
        "M,N,K\n1,16,32\n2,16,32\n",
        "m, n, k\n1, 16, 32\n\n2, 16, 32\n",
        "\ufeffM,N,K\r\n1,16,32\r\n2,16,32\r\n",
        "gfx,cu_num,M,N,K,libtype,us\ngfx950,256,1,16,32,ck,4.5\ngfx942,304,2,16,32,ck,5\n",
    ],
)
def test_headers_blanks_and_line_ends(text: str, table: Path, blockscale: Family, no_words: KernelDefaults) -> None:
    table.write_text(text, encoding="utf-8")
    assert _sizes(str(table), blockscale, no_words) == [(1, 16, 32, 1.0), (2, 16, 32, 1.0)]


def test_weights_layers_and_other_families(table: Path, blockscale: Family, no_words: KernelDefaults) -> None:
    table.write_text("family,M,N,K,count,layer\nsmallblock,1,16,32,5,o\nother,9,9,9,1,x\n,1,16,32,,p\n")
    (problem,) = read(path=str(table)).problems(blockscale, no_words, "sm_90")
    assert (problem.weight, problem.layer) == (6.0, "o+p")


def test_bf16_columns(table: Path, sixteen: Family, no_words: KernelDefaults) -> None:
    table.write_text("M,N,K,bias,dtype,outdtype,scaleAB\n1,16,32,TRUE,torch.float16,torch.float32,FALSE\n")
    (problem,) = read(path=str(table)).problems(sixteen, no_words, "sm_90")
    assert tuple(value for _, value in problem.key) == (1, 16, 32, True, "float16", "float32", False, False)


def test_rows_of_formats_that_the_family_has_not_are_left_out(table: Path, no_words: KernelDefaults) -> None:
    family, source = load_family("a16w16"), read(path=str(table))
    bf16, shuffled = "1,16,32,False,torch.bfloat16,False,False", "2,16,32,False,torch.float16,False,True"
    table.write_text("\n".join(["M,N,K,bias,dtype,scaleAB,bpreshuffle", bf16, shuffled, shuffled]))
    assert [p["M"] for p in source.problems(family, no_words, "sm_90")] == [1]
    assert source.left_out(family, no_words, "sm_90").startswith(f"2 rows, the first: {table}:3: a16w16 M=2")
    table.write_text("\n".join(["M,N,K,bias,dtype,scaleAB,bpreshuffle", bf16]))
    source.problems(family, no_words, "sm_90")
    assert source.left_out(family, no_words, "sm_90") == ""
    table.write_text("\n".join(["M,N,K,bias,dtype,scaleAB,bpreshuffle", shuffled]))
    with pytest.raises(UserError, match=r"shapes.csv:2: a16w16 M=2 .*dtype with bpreshuffle=True: 'float16'"):
        source.problems(family, no_words, "sm_90")


def test_a_list_and_a_glob(tmp_path: Path, blockscale: Family, no_words: KernelDefaults) -> None:
    (tmp_path / "a.csv").write_text("M,N,K\n1,16,32\n")
    (tmp_path / "b.csv").write_text("M,N,K\n2,16,32\n")
    both = [(1, 16, 32, 1.0), (2, 16, 32, 1.0)]
    assert _sizes(f"{tmp_path}/*.csv", blockscale, no_words) == both
    assert _sizes([f"{tmp_path}/a.csv", f"{tmp_path}/*.csv"], blockscale, no_words) == both


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("M,N\n1,2\n", r"shapes.csv:1: no column 'K', expected the key of smallblock \(M, N, K\), found M, N"),
        ("", "shapes.csv:1: no column 'M'.*found an empty file"),
        ("M,N,K\n1,2,3\n1,x,3\n", "shapes.csv:3: column N: 'x', expected a whole number"),
        ("M,N,K\n-1,2,3\n", "shapes.csv:2: column M: '-1', expected a whole number"),
        ("M,N,K\n1,2\n", "shapes.csv:2: 2 cells, expected 3 as in the header"),
        ("M,N,K\n1,2,3,4\n", "shapes.csv:2: 4 cells, expected 3"),
        ("M,N,K,count\n1,2,3,0\n", "shapes.csv:2: column count: '0', expected a number above 0"),
        ('M,N,K\n1,2,"3\n4,5,6\n', "shapes.csv:2: .*unexpected end of data"),
        ('M,N,K\n1,2,"3\n4,5,6"\n', "shapes.csv:2: a quote that is not closed in its line"),
        ("M,N,K\n", "no problem of smallblock in"),
        ("M;N;K\n1;2;3\n", "shapes.csv:1: no column 'M'.*found M;N;K; columns are separated by commas, not by ';'"),
        ("token,model_dim,inter_dim,expert,topk\n1,2,3,4,5\n", "found token, .*, topk; they are of kernel=fmoe$"),
    ],
)
def test_wrong_tables(text: str, line: str, table: Path, blockscale: Family, no_words: KernelDefaults) -> None:
    table.write_text(text)
    with pytest.raises(UserError, match=line) as caught:
        read(path=str(table)).problems(blockscale, no_words, "sm_90")
    assert "\n" not in str(caught.value)


def test_no_such_file(table: Path, blockscale: Family, no_words: KernelDefaults) -> None:
    table.write_text("M,N,K\n")
    with pytest.raises(UserError, match=r"no file '.*shape.csv'; did you mean 'shapes.csv'"):
        read(path=str(table.with_name("shape.csv"))).problems(blockscale, no_words, "sm_90")
    with pytest.raises(UserError, match="is a folder"):
        read(path=str(table.parent)).problems(blockscale, no_words, "sm_90")
    with pytest.raises(UserError, match="expected a CSV file, a list of files or a glob"):
        read(path=()).problems(blockscale, no_words, "sm_90")


def test_not_text(table: Path, blockscale: Family, no_words: KernelDefaults) -> None:
    table.write_bytes(b"M,N,K\n\xff\xfe,1,2\n")
    with pytest.raises(UserError, match=r"shapes.csv:1: not text in UTF-8"):
        read(path=str(table)).problems(blockscale, no_words, "sm_90")


@pytest.mark.skipif(not DATA.exists(), reason="collected data of aiter not here")
def test_aiters_own_tables(sixteen: Family, blockscale: Family, no_words: KernelDefaults) -> None:
    for path in sorted(DATA.glob("a*gemm*.csv")):
        assert _sizes(str(path), blockscale, no_words)
    for path in sorted(DATA.glob("bf16*.csv")):
        assert _sizes(str(path), sixteen, no_words)


@pytest.mark.parametrize(
    ("family", "text", "key"),
    [
        ("a8w8_blockscale", "M,N,K\n16, 1536, 7168\n", (16, 1536, 7168)),
        ("a8w8_blockscale", "M,N,K,q_dtype_w\n16,1536,7168,torch.float8_e4m3fn\n", (16, 1536, 7168, "float8_e4m3fn")),
        ("a8w8_blockscale_bpreshuffle", "M,N,K\n16,1536,7168\n", (16, 1536, 7168)),
        ("a8w8", "M,N,K,q_dtype_w\n1,1280,8192,torch.int8\n", (1, 1280, 8192, "int8", "bfloat16", "row")),
        ("a8w8_bpreshuffle", "M,N,K,q_dtype_w\n1,1280,8192,torch.int8\n", (1, 1280, 8192, "int8")),
        ("a4w4_blockscale", "M,N,K\n1, 16384, 16384\n", (1, 16384, 16384)),
        ("batched_bf16", "B,M,N,K\n16,1,1280,8192\n", (16, 1, 1280, 8192)),
        ("batched_a8w8", "b,m,n,k\n16,1,1280,8192\n", (16, 1, 1280, 8192)),
        (
            "a16w16",
            "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\n64,256,5120,FALSE,torch.bfloat16,torch.float32,False,False\n",
            (64, 256, 5120, False, "bfloat16", "float32", False, False),
        ),
        (
            "a16w16",
            "M,N,K,bias,dtype,outdtype,scaleAB\n64,256,5120,True,torch.bfloat16,torch.bfloat16,False\n",
            (64, 256, 5120, True, "bfloat16", "bfloat16", False, False),
        ),
        (
            "fmoe",
            "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1\n"
            "512,6144,4096,8,2,ActivationType.Silu,torch.bfloat16,torch.bfloat16,torch.bfloat16,QuantType.No,1,0\n",
            (512, 6144, 4096, 8, 2, "ActivationType.Silu", "bfloat16", "bfloat16", "bfloat16", "QuantType.No", 1, 0),
        ),
    ],
)
def test_aiters_untuned_tables_of_every_family(
    family: str, text: str, key: tuple[object, ...], table: Path, no_words: KernelDefaults
) -> None:
    table.write_text(text)
    (problem,) = read(path=str(table)).problems(load_family(family), no_words, "sm_90")
    assert tuple(value for _, value in problem.key)[: len(key)] == key


def test_rows_of_other_kernels_are_reported(table: Path, blockscale: Family, no_words: KernelDefaults) -> None:
    mine = f"{blockscale.name},1,16,32,5\n"
    table.write_text(f"family,M,N,K,count\n{mine}other,1,8,8,2\na16w16,4,8,8,3\nother,2,8,8,1\n")
    source = read(path=str(table))
    for _ in range(2):  # counts start again
        assert [p.weight for p in source.problems(blockscale, no_words, "sm_90")] == [5.0]
        assert source.left_out(blockscale, no_words, "sm_90") == "3 of a16w16, 3 of other"
    table.write_text(table.read_text().replace(mine, ""))
    with pytest.raises(UserError, match=rf"no problem of {blockscale.name} in .*, but 3 of a16w16, 3 of other"):
        source.problems(blockscale, no_words, "sm_90")


def test_bad_rows_are_left_out_on_request(tmp_path: Path) -> None:
    path, defaults = tmp_path / "t.csv", KernelDefaults(dtype=None, out_dtype=None, bias=None)
    path.write_text("M,N,K\n8,32,64\neight,32,64\n-1,32,64\n16,32,64\n")
    family = load_family("a16w16")
    with pytest.raises(UserError, match=r"t\.csv:3: column M: 'eight'"):
        CsvShapes(path=str(path), rows_of=None).problems(family, defaults, "sm_90")
    source = CsvShapes(path=str(path), rows_of=None, skip_bad_rows=True)
    assert [problem["M"] for problem in source.problems(family, defaults, "sm_90")] == [8, 16]
    assert "2 rows, the first: " in source.left_out(family, defaults, "sm_90")
    path.write_text("M,N,K\neight,32,64\n")
    with pytest.raises(UserError, match="column M: 'eight'"):
        source.problems(family, defaults, "sm_90")


@pytest.mark.parametrize(
    ("kernel", "text", "fits"),
    [
        ("a8w8_blockscale", "M,N,K,dtype\n16,64,64,torch.bfloat16\n", "a16w16 or a16w16_atomic"),
        ("a8w8", "M,N,K,dtype\n16,64,64,bf16\n", "a16w16 or a16w16_atomic"),
        ("a8w8_blockscale", "M,N,K,q_dtype_w\n16,64,64,torch.int8\n", "a8w8 or a8w8_bpreshuffle"),
        ("a16w16", "M,N,K,q_dtype_w\n16,64,64,torch.int8\n", "a8w8 or a8w8_bpreshuffle"),
        ("a8w8_blockscale", "B,M,N,K\n4,16,64,64\n", "batched_a8w8 or batched_bf16"),
    ],
)
def test_values_that_contradict_the_kernel_name_those_that_they_fit(
    kernel: str, text: str, fits: str, table: Path, no_words: KernelDefaults
) -> None:
    table.write_text(text)
    with pytest.raises(UserError, match=rf"shapes\.csv:2: .*kernel={fits}$"):
        read(path=str(table)).problems(load_family(kernel), no_words, "sm_90")


def test_a_row_that_no_kernel_computes_names_none(table: Path, blockscale: Family, no_words: KernelDefaults) -> None:
    table.write_text("M,N,K\n0,64,64\n")
    with pytest.raises(UserError, match=r"expected a whole number from 1 to 2147483647$"):
        read(path=str(table)).problems(blockscale, no_words, "sm_90")


def test_a_wrong_routing_is_an_error_of_the_row_or_the_option(table: Path, no_words: KernelDefaults) -> None:
    fmoe, header = load_family("fmoe"), "token,model_dim,inter_dim,expert,topk,routing\n"
    table.write_text(f"{header}4,64,32,8,2,\n5,64,32,8,2,8/0\n6,64,32,8,2,skewd\n")
    with pytest.raises(UserError, match=r"shapes\.csv:3: column routing: '8/0' gives .* every row then has it$"):
        read(path=str(table)).problems(fmoe, no_words, "sm_90")
    source = read(path=str(table), skip_bad_rows=True)
    assert [p["token"] for p in source.problems(fmoe, no_words, "sm_90")] == [4]
    assert source.left_out(fmoe, no_words, "sm_90").startswith("2 rows, the first:")
    for routing in ("8/0", "unifrom"):
        with pytest.raises(UserError, match=rf"^kernel\.key\.routing: '{routing}'.*[^e]$"):
            source.problems(fmoe, replace(no_words, key={"routing": routing}), "sm_90")
