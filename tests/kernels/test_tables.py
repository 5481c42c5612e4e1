"""Native and aiter's tables of every family: written rows are read, a changed byte is rejected or changes one cell."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import PACKAGE
from gemmpipe.core.schema import RESULT
from gemmpipe.family import Family, KernelDefaults, KeyColumn, load_family
from gemmpipe.family.aiter_table import render
from gemmpipe.tables import store
from gemmpipe.tables.merge import Row

FAMILIES = sorted(path.parent.name for path in (PACKAGE / "kernels").glob("*/__init__.py"))
AITERS = [name for name in FAMILIES if load_family(name).aiter_table is not None]
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz", "int8")
TIMES = st.floats(min_value=1e-3, max_value=1e6).map(lambda value: round(value, 4))
SHARES = st.floats(0, 1).map(lambda value: round(value, 4))
NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)


def _values(column: KeyColumn) -> st.SearchStrategy[str | int | bool]:
    if column.kind == "str":
        return st.sampled_from(sorted({meaning for _, meaning in column.choices}) or ["row", "tensor"])
    kinds = {"int": st.integers(1, 2**20), "bool": st.booleans(), "flag": st.integers(0, 1)}
    return kinds.get(column.kind, st.sampled_from(DTYPES))


@st.composite
def _rows(draw: st.DrawFn, family: Family) -> list[Row]:
    """Rows of a native table, each key once."""
    keys = draw(st.lists(st.tuples(*map(_values, family.key_columns)), min_size=1, max_size=4, unique=True))
    rows = []
    for key in keys:
        row: Row = dict.fromkeys((*RESULT, *family.extra_columns))
        row |= {"gfx": draw(st.sampled_from(["gfx942", "sm_90"])), "cu_num": draw(st.sampled_from([80, 132, 304]))}
        row |= dict(zip((column.name for column in family.key_columns), key, strict=True))
        row |= {"libtype": draw(st.sampled_from(["triton", "ck", "asm"])), "us": draw(TIMES), "splitK": 4, "solidx": 3}
        row |= {"kernelName": draw(NAMES), "config": draw(st.sampled_from([None, "{}", '{"a":1,"b":null}']))}
        row |= {"backend_ratios": draw(st.sampled_from([None, '{"torch":1.5}', '{"ck":0.99,"torch":2}']))}
        rows.append(row | {"err_ratio": draw(SHARES), "near_ties": draw(st.none() | st.integers(0, 9))})
    return rows


def _written(tmp_path_factory: pytest.TempPathFactory, text: str | bytes) -> Path:
    path = tmp_path_factory.mktemp("table") / "t.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=10)
@given(data=st.data())
def test_a_native_table_is_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    family = load_family(name)
    rows = data.draw(_rows(family))
    path = _written(tmp_path_factory, store.render(rows, family, ()))
    assert store.read(path, family) == rows


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=20)
@given(data=st.data(), place=st.floats(0, 1, exclude_max=True), byte=st.sampled_from(b' ,"\n\r0159xT{}:.-_\x00\xff'))
def test_a_changed_byte_is_rejected_or_changes_one_cell(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject, place: float, byte: int
) -> None:
    family = load_family(name)
    rows = data.draw(_rows(family))
    raw = bytearray(store.render(rows, family, ()).encode())
    start = raw.index(b"\n") + 1
    raw[start + int(place * (len(raw) - 1 - start))] = byte
    _expect_one_change(_written(tmp_path_factory, bytes(raw)), family, rows)


def _expect_one_change(path: Path, family: Family, rows: list[Row]) -> None:
    """Only columns in the file count: missing ones follow from its gfx, and the meaning of splitK from libtype."""
    names = [name.strip('"') for name in path.read_text(errors="replace").split("\n")[0].split(",")]
    lacking = {column.name for column in family.key_columns} - set(names)
    try:
        table = store.load(path, family)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    found = [*table.rows, *(row for row, _ in table.refused)]
    before, after = [row for row in rows if row not in found], [row for row in found if row not in rows]
    assert len(before) == len(after) <= 1
    for old, new in zip(before, after, strict=True):
        changed = {column for column in old if column not in lacking and old[column] != new[column]}
        assert len(changed - ({"splitK"} if "libtype" in changed else set())) == 1


@st.composite
def _aiters_rows(draw: st.DrawFn, family: Family) -> list[Row]:
    """Rows as in aiter's table of the family: its own libraries, our other key columns as implied or by default."""
    table = family.aiter_table
    assert table is not None
    fill = family.key_defaults(KernelDefaults(dtype=None, out_dtype=None, bias=None), "gfx942")
    fill = {**fill, **table.implied}
    own = [column for column in family.key_columns if column.name in table.columns]
    rows = []
    for key in draw(st.lists(st.tuples(*map(_values, own)), min_size=1, max_size=4, unique=True)):
        row: Row = {"gfx": "gfx942", "cu_num": 304}
        row |= {column.name: fill.get(column.name, column.default) for column in family.key_columns}
        row |= dict(zip((column.name for column in own), key, strict=True))
        cells: Row = {"solidx": draw(st.integers(-1, 999)), "splitK": draw(st.sampled_from([1, 2, 4, 8]))}
        cells |= {"us": draw(TIMES), "kernelName": draw(NAMES), "err_ratio": draw(SHARES), "tflops": 1.5}
        cells |= {"bw": draw(TIMES), "libtype": draw(st.sampled_from(["ck", "asm", "opus"]))}
        theirs = [_OURS.get(name, name) for name in table.columns]
        rows.append({**row, **{name: cells.get(name) for name in theirs if name not in row}})
    return rows


_OURS = {"kernelId": "solidx", "errRatio": "err_ratio"}


def _dtypes(family: Family) -> list[str]:
    return [column.name for column in family.key_columns if column.kind == "dtype"]


@pytest.mark.parametrize("name", AITERS)
@settings(max_examples=10)
@given(data=st.data())
def test_aiters_table_is_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    family = load_family(name)
    rows = data.draw(_aiters_rows(family))
    assert family.aiter_table is not None
    text = render(rows, family.aiter_table, _dtypes(family))
    assert text.splitlines()[0] == ",".join(("gfx", "cu_num", *family.aiter_table.columns))
    assert store.read(_written(tmp_path_factory, text), family) == rows


@pytest.mark.parametrize("name", AITERS)
@settings(max_examples=15)
@given(data=st.data(), place=st.floats(0, 1, exclude_max=True), byte=st.sampled_from(b' ,"\n\r0159xT:.-_\x00\xff'))
def test_a_changed_byte_of_aiters_table(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject, place: float, byte: int
) -> None:
    family = load_family(name)
    rows = data.draw(_aiters_rows(family))
    assert family.aiter_table is not None
    raw = bytearray(render(rows, family.aiter_table, _dtypes(family)).encode())
    start = raw.index(b"\n") + 1
    raw[start + int(place * (len(raw) - 1 - start))] = byte
    _expect_one_change(_written(tmp_path_factory, bytes(raw)), family, rows)
