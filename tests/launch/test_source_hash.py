"""A kernel's hash covers its code, that of its callees, and the fields of its NamedTuples."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmpipe.core.data import Build
from gemmpipe.core.device import arch_device
from gemmpipe.launch.build import compile_kernel, is_interpreted, read_code
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
            {"constexpr": ': "tl.constexpr"'},
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


HEAD = """
from enum import IntEnum
from typing import NamedTuple

import triton
import triton.language as tl

"""
KERNEL = """

@triton.jit
def kernel(x_ptr, y_ptr):
    value = tl.load(x_ptr)
    tl.store(y_ptr, {0})
"""
DIFFERENCE = "@triton.jit\ndef difference({0}, {1}):\n    return {0} - 2 * {1}\n" + KERNEL.format(
    "difference(first=value, second=5.0)"
)
CHANGES = {
    "parameters exchanged": (DIFFERENCE.format("first", "second"), DIFFERENCE.format("second", "first")),
    "a boolean": tuple(
        f"NEGATE = tl.constexpr({value})\n" + KERNEL.format("-value if NEGATE else value") for value in (True, False)
    ),
    "a computed boolean": tuple(
        f"SIZE = {size}\nLARGE: tl.constexpr = tl.constexpr(SIZE > 4)\n" + KERNEL.format("-value if LARGE else value")
        for size in (4, 5)
    ),
    "a dtype": tuple(
        f"TYPE = tl.constexpr(tl.{name})\n" + KERNEL.format("value.to(TYPE).to(tl.float32)")
        for name in ("float16", "bfloat16")
    ),
    "a default": tuple(
        f"@triton.jit\ndef scaled(value, factor: tl.constexpr = {factor}):\n    return value * factor\n"
        + KERNEL.format("scaled(value)")
        for factor in (2, 3)
    ),
    "a global in a default": tuple(
        f"FACTOR = {factor}\n\n@triton.jit\ndef scaled(value, factor: tl.constexpr = FACTOR):\n"
        "    return value * factor\n" + KERNEL.format("scaled(value)")
        for factor in (2, 3)
    ),
    "an argument of a decorator": tuple(
        f"{decorator}\ndef scaled(value):\n    return tl.exp(value) * 3\n" + KERNEL.format("scaled(value)")
        for decorator in ("@triton.jit", "@triton.jit(noinline=True)")
    ),
    "a table": tuple(
        f"FACTORS = {{1: {n}, 2: 7}}\n\n@triton.constexpr_function\ndef scale(n):\n    return FACTORS[n]\n"
        + KERNEL.format("value * scale(1)")
        for n in (2, 3)
    ),
    "a member of an enum": tuple(
        f"class Mode(IntEnum):\n    FAST = {n}\n\n@triton.constexpr_function\ndef scale():\n"
        "    return Mode.FAST.value\n" + KERNEL.format("value * scale()")
        for n in (2, 3)
    ),
    "a default of a NamedTuple": tuple(
        f"class Pair(NamedTuple):\n    first: int = {n}\n\n@triton.constexpr_function\ndef scale():\n"
        "    return Pair().first\n" + KERNEL.format("value * scale()")
        for n in (2, 3)
    ),
    "a method of an aggregate": tuple(
        "from triton.language.core import _aggregate\n\n@_aggregate\nclass Scale:\n    factor: tl.constexpr\n\n"
        "    @triton.constexpr_function\n    def __init__(self, factor):\n"
        "        self.factor = tl.constexpr(factor)\n\n    @triton.jit\n    def of(self, value):\n"
        f"        return value * Scale(self.factor).factor + {n}\n" + KERNEL.format("Scale(2).of(value)")
        for n in (2, 3)
    ),
    "a value of the enclosing function": tuple(
        "def make(FACTOR):\n    @triton.jit\n    def kernel(x_ptr, y_ptr):\n"
        "        tl.store(y_ptr, tl.load(x_ptr) * FACTOR)\n\n    return kernel\n\n"
        f"kernel = make(tl.constexpr({n}))\n"
        for n in (2, 3)
    ),
}
HELPER = HEAD + "FACTOR = tl.constexpr({0})\n\n@triton.jit\ndef scaled(value):\n    return value * {1}\n"
OTHER_MODULES = {
    "a function of a module": ("import {0} as helper\n" + KERNEL.format("helper.scaled(value)"), (2, 2), (2, 3)),
    "a constant of a module": ("import {0} as helper\n" + KERNEL.format("value * helper.FACTOR"), (2, 2), (3, 2)),
    "an imported function": ("from {0} import scaled\n" + KERNEL.format("scaled(value)"), (2, 2), (2, 3)),
    "an imported constant": ("from {0} import FACTOR\n" + KERNEL.format("value * FACTOR"), (2, 2), (3, 2)),
}
SM_90 = arch_device("sm_90")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], tuple[str, bytes]]:
    """The hash and the instructions of a module's kernel."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def compile_module(name: str, text: str) -> tuple[str, bytes]:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / f"cache_{name}"))  # Triton's keys miss some changes
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        kernel = importlib.import_module(name).kernel
        if is_interpreted(kernel):
            pytest.skip("kernels are decorated for the interpreter in this process")
        build = Build(
            kernel=f"{name}:kernel",
            source_hash=source_hash(kernel),
            signature=(("x_ptr", "*fp32"), ("y_ptr", "*fp32")),
            constants=(),
            aligned=("x_ptr", "y_ptr"),
            options=(("num_warps", 1),),
        )
        return build.source_hash, read_code(compile_kernel(build, SM_90).asm["cubin"])

    return compile_module


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_binary_changes_the_hash(
    change: str, compiled: Callable[[str, str], tuple[str, bytes]]
) -> None:
    names = [f"{change.replace(' ', '_')}_{part}" for part in ("before", "after")]
    before, after = (compiled(name, HEAD + text) for name, text in zip(names, CHANGES[change], strict=True))
    assert before[1] != after[1], "another binary"
    assert before[0] != after[0], "another hash"


@pytest.mark.parametrize("change", OTHER_MODULES)
def test_a_change_in_another_module_changes_the_hash(
    change: str, compiled: Callable[[str, str], tuple[str, bytes]], tmp_path: Path
) -> None:
    text, *helpers = OTHER_MODULES[change]
    found = []
    for number, helper in enumerate(helpers):
        name = f"triton_{change.replace(' ', '_')}_{number}"  # not Triton, in spite of its name
        (tmp_path / f"{name}.py").write_text(HELPER.format(*helper))
        found.append(compiled(f"{name}_kernel", HEAD + text.format(name)))
    assert found[0][1] != found[1][1], "another binary"
    assert found[0][0] != found[1][0], "another hash"


def test_renamed_keyword_arguments_and_flags_of_triton_do_not_count(
    compiled: Callable[[str, str], tuple[str, bytes]],
) -> None:
    renamed = DIFFERENCE.replace("first=", "left=").replace("second=", "right=").format("left", "right")
    found = [compiled("plain_names", HEAD + DIFFERENCE.format("first", "second")), compiled("renamed", HEAD + renamed)]
    assert found[0] == found[1]
    text = HEAD + "NEW = tl.constexpr(hasattr(tl, {0!r}))\n" + KERNEL.format("value if NEW else value")
    assert compiled("of_one_triton", text.format("load"))[0] == compiled("of_another", text.format("absent"))[0]


def test_a_function_that_calls_itself(compiled: Callable[[str, str], tuple[str, bytes]]) -> None:
    text = "@triton.constexpr_function\ndef count(n):\n    return {0} if n == 0 else 1 + count(n - 1)\n"
    text = HEAD + text + KERNEL.format("value * count(3)")
    assert compiled("recursive", text.replace("{0}", "0"))[0] != compiled("recursive_too", text.replace("{0}", "1"))[0]
