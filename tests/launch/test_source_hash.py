"""A kernel's hash covers its code, that of its callees, and the fields of its NamedTuples."""

import importlib
from pathlib import Path

import pytest

from gemmpipe.launch.source_hash import earlier_hashes, same_kernel, source_hash

MODULE = """
from typing import NamedTuple

import triton
import triton.language as tl


class Place(NamedTuple):
    {fields}


@triton.jit
def first(place):
    return place.row{more}


@triton.jit
def kernel(x_ptr):
    place = Place(0, 1)
    tl.store(x_ptr, first(place))
"""
ROW, COLUMN = "row: tl.tensor", "column: tl.tensor"


def hash_of(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, **parts: str) -> str:
    (folder / f"{name}.py").write_text(MODULE.format(**parts))
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    return source_hash(importlib.import_module(name).kernel)


def test_a_hash_covers_callees_and_tuple_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal source has equal hashes in all modules; another callee or another order of fields changes the hash."""
    rows_first = f"{ROW}\n    {COLUMN}"
    hashes = [
        hash_of(tmp_path, monkeypatch, "hashed_once", fields=rows_first, more=""),
        hash_of(tmp_path, monkeypatch, "hashed_again", fields=rows_first, more=""),
        hash_of(tmp_path, monkeypatch, "hashed_callee", fields=rows_first, more=" + 1"),
        hash_of(tmp_path, monkeypatch, "hashed_fields", fields=f"{COLUMN}\n    {ROW}", more=""),
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


COMPREHENSION = """
import triton
import triton.language as tl


@triton.constexpr_function
def width(i):
    return i + {one}


@triton.constexpr_function
def most(count):
    return max([width(i) for i in range(count)])


@triton.jit
def kernel(x_ptr, COUNT: tl.constexpr):
    tl.store(x_ptr, most(COUNT))
"""


def test_callees_in_a_comprehension_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.12 its names are not among those of the enclosing function."""
    hashes = set()
    for name, one in (("listed_one", 1), ("listed_two", 2)):
        (tmp_path / f"{name}.py").write_text(COMPREHENSION.format(one=one))
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        hashes.add(source_hash(importlib.import_module(name).kernel))
    assert len(hashes) == 2


DOCUMENTED = """
import triton
import triton.language as tl

SIZE: tl.constexpr = tl.constexpr({size})


@triton.jit
def {callee}(value, ROWS: tl.constexpr):
    return value * ROWS


@triton.jit
def kernel(x_ptr, {operand}, COUNT{constexpr}):
    {prose}
    {total} = {callee}({operand}, ROWS=2) + SIZE  {comment}
    tl.store(x_ptr, {total} {sign} COUNT)
"""
PLAIN = {
    "size": 4,
    "callee": "twice",
    "operand": "value",
    "constexpr": ": tl.constexpr",
    "prose": '"""A kernel."""',
    "total": "total",
    "comment": "",
    "sign": "+",
}


def _hash(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, **other: object) -> str:
    (folder / f"{name}.py").write_text(DOCUMENTED.format(**{**PLAIN, **other}))
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    return source_hash(importlib.import_module(name).kernel)


def test_prose_and_renames_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _hash(tmp_path, monkeypatch, "plain")
    for number, other in enumerate(
        (
            {"prose": '"""Another text."""'},
            {"comment": "# why"},
            {"operand": "number"},
            {"total": "sum_of_all"},
            {"callee": "doubled"},
        )
    ):
        assert _hash(tmp_path, monkeypatch, f"renamed_{number}", **other) == plain, other


def test_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [_hash(tmp_path, monkeypatch, "first")]
    for number, other in enumerate(({"sign": "-"}, {"constexpr": ""}, {"size": 5})):
        found.append(_hash(tmp_path, monkeypatch, f"changed_{number}", **other))
    assert len(set(found)) == len(found)


def test_earlier_hashes_are_known_for_current_kernels() -> None:
    known = {old: new for old, news in earlier_hashes().items() for new in news}
    assert all(same_kernel(old, new) for old, new in known.items())
    assert not same_kernel("00000000", "11111111")
