"""Small files that would take hours or all memory to read: refused at once in one line."""

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gemmpipe.core.errors import UserError
from gemmpipe.core.files import parse_object
from gemmpipe.core.jsonstream import objects_in
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.sources.profile import TraceShapes
from gemmpipe.sources.records import LogShapes, TunableopShapes
from gemmpipe.sources.table import CsvShapes

pytestmark = pytest.mark.timeout(120)
"""Each took minutes or did not end; now it is about a second on a busy core."""
MM = {"Input Dims": [[4, 4], [4, 4]], "Input type": ["c10::BFloat16"] * 2}
SHAPE, CONFIG = "not found tuned config in", "Config file not found at "


def _event(index: int, **more: object) -> dict[str, object]:
    times = {"ts": index, "dur": 20_000 - 2 * index}
    return {"ph": "X", "cat": "cpu_op", "name": "aten::mm", **times, "pid": 1, "tid": 1, "args": MM} | more


def _trace(*events: object) -> bytes:
    return json.dumps({"traceEvents": events}).encode()


TRACES = {
    "blanks": (b'{"traceEvents":[' + b" " * 30_000_000 + b"]}", "no product"),
    "a bomb": (lambda: gzip.compress(b" " * 200_000_000), "unpacks to more than 200 times its size"),
    "a value without end": (b'{"traceEvents":["' + b"a" * 20_000_000, "a value of more than 16,000,000 characters"),
    "deep": (b'{"traceEvents":[' + b"[" * 100_000, "nested too deep"),
    "a long number": (b'{"traceEvents":[{"ts":' + b"9" * 5000 + b"}]}", "no JSON at character 17: Exceeds"),
    "operators in operators": (_trace(*map(_event, range(6_000))), "within 1,000 others"),
    "a list that ties": (_trace(_event(0, args={**MM, "External id": [1]})), "External id: '[1]'"),
    "a kernel's list": (_trace({"cat": "kernel", "args": {"External id": {}}}), "External id: '{}'"),
}
LOGS = {
    "no table": (f"{'shape' * 12_000} {SHAPE} ,\n" * 20, "expected `shape is M:.."),
    "no end of a name": (CONFIG + ",a=N=1,device_name=x" * 3_000 + "\n", "expected its name to begin with"),
    "many names": ((CONFIG + "N=1,device_name=" + "x" * 60_000 + "\n") * 20, "expected its name to begin with"),
    "sizes with a blank": ("cudagraph_capture_sizes=[1 2, 3]\n", "captured batch sizes: '1 2'"),
    "a long size": (f"cudagraph_capture_sizes=[{'9' * 5000}]\n", "captured batch sizes: '999"),
}
TABLES = {
    "wide": ("M,N,K," + ",".join(f"c{i}" for i in range(100_000)) + "\n", "100,003 cells, expected at most 1,000"),
    "one line": ("M,N,K\n" + "1," * 2_000_000, "a line of over 1,000,000 characters"),
    "tall cells": ("M,N,K\n" + "1" * 5000 + ",2,3\n", "column M"),
    "heavy": ("M,N,K,weight\n1,2,3,1e308\n1,2,3,1e308\n", "column weight"),
}
TUNABLE = {
    "a long size": (f"GemmTunableOp_BFloat16_TN,tn_{'9' * 5000}_1_1\n", "expected sizes such as"),
}
CASES = [
    *((TraceShapes(path="t", nsets=None, rows_of=None), name, *case) for name, case in TRACES.items()),
    *(
        (LogShapes(path="t", nsets=[1], model_dim=None, topk=None, rows_of=None), name, *case)
        for name, case in LOGS.items()
    ),
    *((CsvShapes(path="t", rows_of=None), name, *case) for name, case in TABLES.items()),
    *((TunableopShapes(path="t", rows_of=None), name, *case) for name, case in TUNABLE.items()),
]


@pytest.fixture
def refused() -> "Callable[[Callable[[], object]], str]":
    """The one-line error of a call."""

    def message(call: Callable[[], object]) -> str:
        with pytest.raises(UserError) as caught:
            call()
        return str(caught.value)

    return message


Refused = Callable[[Callable[[], object]], str]


@pytest.mark.parametrize(
    ("source", "name", "text", "message"), CASES, ids=[f"{type(c[0]).__name__}-{c[1]}" for c in CASES]
)
def test_a_small_file_is_refused(
    source: CsvShapes,
    name: str,
    text: bytes | str | Callable[[], bytes],
    message: str,
    folder: Path,
    no_words: KernelDefaults,
    refused: Refused,
) -> None:
    content = text() if callable(text) else text
    (folder / "t").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused(lambda: source.problems(load_family("a16w16"), no_words, "sm_90"))


@pytest.mark.parametrize("source", {type(c[0]): c[0] for c in CASES}.values(), ids=lambda source: type(source).__name__)
def test_what_is_no_file_is_not_waited_for(
    source: CsvShapes, folder: Path, no_words: KernelDefaults, refused: Refused
) -> None:
    os.mkfifo(folder / "t")
    fresh = replace(source)  # it keeps what it has read
    assert "not a regular file" in refused(lambda: fresh.problems(load_family("a16w16"), no_words, "sm_90"))


@pytest.mark.parametrize(
    "text",
    ['{"a":"' + '\\"' * 300_000, "{" + '"a' * 300_000, '{"a":' + "9" * 5000 + "}", '{"a":"' + "\\" * 400_000],
    ids=["quotes", "names", "a number", "backslashes"],
)
def test_json_without_an_end(text: str, refused: Refused) -> None:
    assert refused(lambda: parse_object(text, "x")).startswith("x")


def test_blanks_between_objects_are_no_content(folder: Path) -> None:
    (folder / "t").write_bytes(b' [ {"a":1} ,\n\n' + b"\t " * 1_000_000 + b'{"a":2}\r\n ] ')
    assert [row["a"] for row in objects_in(folder / "t", "x")] == [1, 2]
