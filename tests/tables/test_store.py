"""Tuned tables on disk: reading, refusing, and merging."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from executed_lines import grows_linearly
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmpipe.core.errors import EnvironmentProblem, UserError
from gemmpipe.core.files import is_formula
from gemmpipe.core.schema import RESULT
from gemmpipe.family import Family
from gemmpipe.tables import store
from gemmpipe.tables.merge import REPLAYED, Row

DATA = Path(__file__).parents[3] / "shared" / "data" / "aiter"
HEADER = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"


def _row(**values: object) -> Row:
    row: dict[str, object] = dict.fromkeys(RESULT)
    row |= {"gfx": "sm_90", "cu_num": 132, "M": 1, "N": 2, "K": 3, "libtype": "triton", "us": 10.0}
    return {**row, **values}  # type: ignore[dict-item]


def _update(path: Path, family: Family, rows: list[Row], run_id: str = "r1", sort: bool = False) -> None:
    facts = {"torch": "2.13"}
    store.update(path, family, rows, sort=sort, min_improvement_pct=0.0, run_id=run_id, provenance=facts, warn=print)


def test_aiters_header(tmp_path: Path, blockscale: Family) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "gfx942,304, 1,3072, 1536,ck,8,0,6.6154,name,1.43,714.43,0.5%\n")
    (row,) = store.read(path, blockscale)
    assert (row["gfx"], row["cu_num"], row["M"], row["solidx"], row["us"]) == ("gfx942", 304, 1, 8, 6.6154)
    assert row["err_ratio"] == pytest.approx(0.005)


def test_gfx_is_inferred_or_required(tmp_path: Path, blockscale: Family) -> None:
    path = tmp_path / "t.csv"
    path.write_text("cu_num,m,n,k,us\n304,1,2,3,4\n80,1,2,3,4\n256,1,2,3,4\n132,1,2,3,4\n")
    assert [row["gfx"] for row in store.read(path, blockscale)] == ["gfx942", "gfx942", "gfx950", "sm_90"]
    path.write_text("cu_num,M,N,K,us\n96,1,2,3,4\n")
    with pytest.raises(UserError, match=r"t.csv:2: no gfx, and not known from cu_num 96; add a column gfx"):
        store.read(path, blockscale)
    path.write_text("gfx,M,N,K,us\ngfx950,1,2,3,4\ngfx942,1,2,3,4\n")
    with pytest.raises(UserError, match=r"t.csv:3: no cu_num, and not known from gfx gfx942"):
        store.read(path, blockscale)


def test_missing_key_columns_are_filled(tmp_path: Path, sixteen: Family) -> None:
    path = tmp_path / "t.csv"
    path.write_text("gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,us\nsm_90,132,1,2,3,TRUE,torch.bfloat16,,FALSE,4\n")
    (row,) = store.read(path, sixteen)
    assert (row["bias"], row["dtype"], row["outdtype"], row["bpreshuffle"]) == (True, "bfloat16", "bfloat16", False)


def test_rows_without_a_time_cannot_win(tmp_path: Path, blockscale: Family) -> None:
    path = tmp_path / "t.csv"
    times = enumerate((0, "", "1e-300", "1e300", "inf", -1), 1)
    path.write_text(HEADER + "".join(f"sm_90,132,{m},2,3,triton,0,0,{us},auto,0,0,0\n" for m, us in times))
    table = store.load(path, blockscale)
    assert table.rows == []
    assert [reason for _, reason in table.refused] == [
        f"{path}:2: us is 0.0, not a measured time",
        f"{path}:3: us is None, not a measured time",
        f"{path}:4: us is 1e-300, not a measured time",
        f"{path}:5: us is 1e+300, not a measured time",
        f"{path}:6: us is None, not a measured time",
        f"{path}:7: us is -1.0, not a measured time",
    ]
    _update(path, blockscale, [_row(us=99.0)])
    assert [(row["M"], row["us"]) for row in store.read(path, blockscale)] == [(1, 99.0)]
    assert len(store.load(path, blockscale).refused) == 5


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (HEADER + "sm_90,132,1,x,3,triton,0,0,1,n,0,0,0\n", "t.csv:2: column N: 'x', expected a whole number"),
        (HEADER + "sm_90,132,1,2,3,triton,0,0,fast,n,0,0,0\n", "column us: 'fast', expected a number; fix or delete"),
        (HEADER + "sm_90,132,1,2,3,triton,0,0\n", "t.csv:2: 8 cells, expected 13"),
        (HEADER + "sm_90,132,1,2,3,triton,0,0,1e999,n,0,0,0\n", "column us: '1e999'"),
        (HEADER + "sm_90,many,1,2,3,triton,0,0,1,n,0,0,0\n", "column cu_num: 'many'"),
        ("gfx,cu_num,M,N,us\n", "t.csv:1: no column 'K'"),
        ("gfx,cu_num,M,N,K\n", "t.csv:1: no column 'us'"),
        ("gfx,cu_num,M,N,K,us,us\n", "duplicate column 'us'"),
        ("", "t.csv:1: no header"),
        ("gfx,cu_num,M,N,K,libtype,us,config\nsm_90,132,1,2,3,torch,4,{x\n", "column config: '{x', expected the knobs"),
    ],
)
def test_a_table_broken_by_hand_stays_as_it_is(text: str, line: str, tmp_path: Path, blockscale: Family) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=line) as caught:
        _update(path, blockscale, [_row()])
    assert "\n" not in str(caught.value)
    assert path.read_text() == text


def test_unknown_columns_and_provenance_stay(tmp_path: Path, blockscale: Family) -> None:
    path = tmp_path / "t.csv"
    path.write_text("gfx,cu_num,M,N,K,us,note,run_id\nsm_90,132,7,2,3,4,by hand,r0\n")
    _update(path, blockscale, [_row(run_id="r1")])
    _update(path, blockscale, [_row(M=2, run_id="r2")], run_id="r2")
    rows = store.read(path, blockscale)
    assert [(row["M"], row["note"], row["run_id"]) for row in rows] == [
        (7, "by hand", "r0"),
        (1, None, "r1"),
        (2, None, "r2"),
    ]
    assert json.loads((tmp_path / "t.csv.meta.json").read_text())["runs"].keys() == {"r1", "r2"}


def test_rows_of_before_there_was_a_column_keep_their_product(tmp_path: Path, blockscale: Family) -> None:
    path = tmp_path / "t.csv"
    path.write_text("gfx,cu_num,M,N,K,libtype,us,run_id\nsm_90,132,1,2,3,torch,9,r\nsm_90,132,2,2,3,torch,0,r\n")
    (tmp_path / "t.csv.meta.json").write_text('{"runs": {"r": {"device": "NVIDIA H200"}}}')
    _update(path, blockscale, [_row(M=4, device="NVIDIA H100")])
    rows = store.parse_table(path, blockscale).rows
    assert {row["M"]: row["device"] for row in rows} == {1: "NVIDIA H200", 2: "NVIDIA H200", 4: "NVIDIA H100"}


def test_a_broken_sidecar_is_set_aside(tmp_path: Path, blockscale: Family) -> None:
    (tmp_path / "t.csv.meta.json").write_text("{half")
    _update(tmp_path / "t.csv", blockscale, [_row(run_id="r1")])
    assert (tmp_path / "t.csv.meta.json.broken").read_text() == "{half"


def test_sorted_as_aiter_sorts(tmp_path: Path, blockscale: Family) -> None:
    path = tmp_path / "t.csv"
    _update(path, blockscale, [_row(M=9, N=2), _row(M=1, N=4), _row(M=1, N=2), _row(M=1, N=1, cu_num=8)], sort=True)
    assert [(r["cu_num"], r["N"], r["M"]) for r in store.read(path, blockscale)] == [
        (8, 1, 1),
        (132, 2, 1),
        (132, 2, 9),
        (132, 4, 1),
    ]


def test_an_unwritable_folder_is_the_environments(tmp_path: Path, blockscale: Family) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        _update(tmp_path / "file" / "t.csv", blockscale, [_row()])


def test_an_update_grows_with_the_rows_of_the_table(tmp_path: Path, sixteen: Family) -> None:
    key = {"bias": False, "dtype": "bfloat16", "outdtype": "bfloat16", "scaleAB": False, "bpreshuffle": False}

    def update(count: int) -> Callable[[], object]:
        rows = [_row(**key, M=m, us=m / 7, config='{"a":1}', run_id="r") for m in range(1, count + 1)]
        path = tmp_path / f"{count}.csv"
        _update(path, sixteen, rows)
        return lambda: _update(path, sixteen, [*rows[: count // 2], _row(**key, M=10**6)])

    grows_linearly(update, 1000)
    assert len(store.read(tmp_path / "2000.csv", sixteen)) == 2_001


_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=12).filter(
    lambda text: not is_formula(text)
)
_TIME = st.floats(min_value=1e-3, max_value=1e6)


@settings(max_examples=60)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "M": st.integers(1, 2**20),
                "bias": st.booleans(),
                "dtype": st.sampled_from(["bfloat16", "float16", "float8_e4m3fn"]),
                "us": _TIME,
                "solidx": st.none() | st.integers(-5, 10**6),
                "kernelName": st.none() | _TEXT,
                "config": st.sampled_from([None, "{}", '{"a, \\"b\\"":1,"c":null}']),
                "ratio_low": st.none() | _TIME,
                "policy": st.none() | _TEXT.filter(lambda text: REPLAYED not in text.split()),  # no table takes these
                "note": st.none() | _TEXT,
            }
        ),
        max_size=5,
        unique_by=lambda row: (row["M"], row["bias"], row["dtype"]),
    )
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, sixteen: Family, rows: list[dict[str, object]]
) -> None:
    path = tmp_path_factory.mktemp("store") / "t.csv"
    key = {"outdtype": "bfloat16", "scaleAB": False, "bpreshuffle": False}
    full = [_row(**key | row) for row in rows]
    path.write_text(store.render(full, sixteen, ("note",)), encoding="utf-8", newline="")
    assert store.read(path, sixteen) == full


_CELLS = {"solidx": 0, "splitK": 1, "us": 4.5, "kernelName": "k@3fa9", "config": '{"a":1,"b":""}', "run_id": "r1"}
_SOUND = [
    _row(M=m, bias=True, dtype="bfloat16", outdtype="float16", scaleAB=False, bpreshuffle=False, **_CELLS)
    for m in (1, 64, 4096)
]


def _every_row(path: Path, family: Family) -> list[Row]:
    table = store.load(path, family)
    return [*table.rows, *(row for row, _ in table.refused)]


@settings(max_examples=400)
@given(place=st.floats(0, 1, exclude_max=True), byte=st.sampled_from(b' ,"\n\r0159xT{}:.-_\x00\xff'))
def test_a_changed_byte_is_refused_or_changes_one_cell(
    tmp_path_factory: pytest.TempPathFactory, sixteen: Family, place: float, byte: int
) -> None:
    path = tmp_path_factory.mktemp("store") / "t.csv"
    raw = bytearray(store.render(_SOUND, sixteen, ()).encode())
    start = raw.index(b"\n") + 1
    raw[start + int(place * (len(raw) - 1 - start))] = byte
    path.write_bytes(bytes(raw))
    try:
        found = _every_row(path, sixteen)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    before = [row for row in _SOUND if row not in found]
    after = [row for row in found if row not in _SOUND]
    assert len(before) == len(after) <= 1
    for old, new in zip(before, after, strict=True):
        assert sum(old[name] != new[name] for name in old) == 1


def test_a_misspelt_column_is_suggested(tmp_path: Path, blockscale: Family) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER.replace("libtype", "libtyp"))
    with pytest.raises(UserError, match=r"t.csv:1: no column 'libtyp'; did you mean 'libtype'"):
        store.read(path, blockscale)


@pytest.mark.skipif(not DATA.exists(), reason="collected data of aiter not here")
def test_aiters_own_tables(sixteen: Family, blockscale: Family) -> None:
    for path in DATA.glob("a8w8*_tuned_gemm*.csv"):
        assert store.read(path, blockscale)
    assert store.read(DATA / "bf16_tuned_gemm.head40.csv", sixteen)
