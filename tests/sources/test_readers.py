"""Every file format of products: written and read back, and corrupted by one byte or cell."""

import gzip
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pairwise import few

from gemmpipe.core.errors import UserError
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.runtime.capture.recorder import Recorder
from gemmpipe.sources import Source
from gemmpipe.sources.profile import TraceShapes
from gemmpipe.sources.records import LogShapes, TunableopShapes
from gemmpipe.sources.table import CsvShapes

NOTHING = KernelDefaults(dtype=None, out_dtype=None, bias=None)
Product = tuple[int, int, int, str, bool, int]
"""M, N, K, dtype, bias, count."""
Read = dict[tuple[object, ...], tuple[float, str]]
"""Key -> weight and layers."""

SIZE = st.integers(1, 9000)
PRODUCT = st.tuples(
    SIZE, SIZE, SIZE.map(lambda k: 2 * k), st.sampled_from(["bfloat16", "float16"]), st.booleans(), st.integers(1, 4)
)
PRODUCTS = st.lists(PRODUCT, min_size=1, max_size=4, unique_by=lambda p: p[:5])


def key(product: Product) -> tuple[object, ...]:
    m, n, k, dtype, bias, _ = product
    return (m, n, k, bias, dtype, dtype, False, False)


def expected(products: Sequence[Product], *, counted: bool) -> Read:
    return {key(each): (float(each[5]) if counted else 1.0, "") for each in products}


def read(source: Callable[[str], Source], path: Path, family: str = "a16w16") -> Read:
    made = source(str(path)).problems(load_family(family), NOTHING, "sm_90")
    return {tuple(value for _, value in p.key): (p.weight, p.layer) for p in made}


def csv_source(path: str) -> Source:
    return CsvShapes(path=path, rows_of=None)


def trace_source(path: str) -> Source:
    return TraceShapes(path=path, rows_of=None, nsets=None)


def tunable_source(path: str) -> Source:
    return TunableopShapes(path=path, rows_of=None)


def log_source(path: str) -> Source:
    return LogShapes(path=path, rows_of=None, nsets=[1, 8], model_dim=None, topk=None)


def write_capture(products: Sequence[Product], path: Path) -> None:
    recorder = Recorder(path=path)
    for m, n, k, dtype, bias, count in products:
        values = {"M": m, "N": n, "K": k, "dtype": dtype, "outdtype": dtype, "bias": bias, "layout": "mk nk"}
        for _ in range(count):
            recorder.add("a16w16", {**values, "scaleAB": False, "bpreshuffle": False, "op": "addmm"}, "")
    recorder.add("other", {"M": 3, "N": 4, "K": 5, "dtype": "float32"}, "")
    recorder.flush()


def write_untuned(products: Sequence[Product], path: Path) -> None:
    header = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle"
    rows = [f"{m},{n},{k},{bias},torch.{dtype},torch.{dtype},False,False" for m, n, k, dtype, bias, _ in products]
    path.write_text("\n".join([header, *rows]) + "\n")


def write_tunable(products: Sequence[Product], path: Path) -> None:
    rows = []
    for m, n, k, dtype, bias, _ in products:
        kind = {"bfloat16": "BFloat16", "float16": "Half"}[dtype]
        rows.append(f"Gemm{'AndBias' * bias}TunableOp_{kind}_TN,tn_{n}_{m}_{k}_ld_{k}_{k}_{n}")
    path.write_text("\n".join(rows) + "\n")


def write_log(products: Sequence[Product], path: Path) -> None:
    lines = ["INFO 11-21 05:31:00 loading weights"]
    for m, n, k, dtype, bias, _ in products:
        lines.append(
            f"[aiter] shape is M:{m}, N:{n}, K:{k} dtype='torch.{dtype}' otype='torch.{dtype}' bias={bias}, "
            "scaleAB=False, bpreshuffle=False, not found tuned config in /tmp/aiter_configs/bf16_tuned_gemm.csv, "
            "will use default config! using torch solution:0"
        )
    path.write_text("\n".join(lines) + "\n")


def event(
    name: str, start: float, dur: float, operands: Sequence[tuple[str, list[int], list[int]]]
) -> dict[str, object]:
    kinds, dims, strides = zip(*operands, strict=True)
    shapes = {"Input type": list(kinds), "Input Dims": list(dims), "Input Strides": list(strides)}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": start, "dur": dur, "args": shapes}


def write_trace(products: Sequence[Product], path: Path) -> None:
    events: list[Mapping[str, object]] = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    clock = itertools.count(step=100)
    for m, n, k, dtype, bias, count in products:
        kind = {"bfloat16": "c10::BFloat16", "float16": "c10::Half"}[dtype]
        x, w = (kind, [m, k], [k, 1]), (kind, [k, n], [1, k])
        for _ in range(count):
            start = float(next(clock))
            outer = (x, (kind, [n, k], [k, 1]), (kind, [n], [1])) if bias else (x, (kind, [n, k], [k, 1]))
            events.append(event("aten::linear", start, 90.0, outer))
            if bias:
                events.append(event("aten::addmm", start + 10, 70.0, ((kind, [n], [1]), x, w)))
            else:
                events.append(event("aten::matmul", start + 10, 70.0, (x, w)))
                events.append(event("aten::mm", start + 20, 40.0, (x, w)))
    text = json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "trace.json"})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text)


FORMATS = [
    (write_capture, csv_source, "seen.csv", True),
    (write_untuned, csv_source, "untuned.csv", False),
    (write_tunable, tunable_source, "tunableop_untuned0.csv", False),
    (write_log, log_source, "server.log", False),
    (write_trace, trace_source, "trace.json", True),
    (write_trace, trace_source, "trace.json.gz", True),
]
NAMES = [name for *_, name, _ in FORMATS]


@pytest.mark.parametrize(("write", "source", "name", "counted"), FORMATS, ids=NAMES)
@given(products=PRODUCTS)
@settings(max_examples=25)
def test_written_and_read_back(
    write: Callable[[Sequence[Product], Path], None],
    source: Callable[[str], Source],
    name: str,
    counted: bool,
    products: list[Product],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(products, Path(folder) / name)
        assert read(source, Path(folder) / name) == expected(products, counted=counted)


@pytest.mark.parametrize(("write", "source", "name", "counted"), FORMATS, ids=NAMES)
@given(products=PRODUCTS, data=st.data())
@settings(max_examples=50)  # of each of six formats
def test_one_byte_changes_one_row_or_is_refused(
    write: Callable[[Sequence[Product], Path], None],
    source: Callable[[str], Source],
    name: str,
    counted: bool,
    products: list[Product],
    data: st.DataObject,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(products, path)
        raw = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(raw) - 1))
        assume(not in_a_time(raw, place))
        raw[place] = data.draw(st.sampled_from([0, 10, 32, 34, 44, 48, 49, 57, 65, 120, 200]) | st.integers(0, 255))
        path.write_bytes(raw)
        check(lambda: read(source, path), expected(products, counted=counted))


def in_a_time(raw: bytes | bytearray, place: int) -> bool:
    """True in a trace's start or duration: an event that takes longer encloses those after it as its own."""
    return re.search(rb'"(ts|dur)": [0-9.]*$', raw[max(0, place - 20) : place]) is not None


@pytest.mark.parametrize(("write", "name"), few([(write_capture, "seen.csv"), (write_untuned, "untuned.csv")], 0))
@given(products=PRODUCTS, data=st.data())
@settings(max_examples=100)
def test_one_cell_changes_one_row_or_is_refused(
    write: Callable[[Sequence[Product], Path], None], name: str, products: list[Product], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(products, path)
        rows = [line.split(",") for line in path.read_text().splitlines()]
        row = data.draw(st.integers(1, len(rows) - 1))
        column = data.draw(st.integers(0, len(rows[0]) - 1))
        rows[row][column] = data.draw(
            st.sampled_from(["", "0", "-1", "1.5", "True", "x", "float32", "7", "1e3", "nan"])
        )
        path.write_text("\n".join(",".join(cells) for cells in rows) + "\n")
        check(lambda: read(csv_source, path), expected(products, counted=write is write_capture))


def check(reading: Callable[[], Read], before: Read) -> None:
    """Refused in one line, or one row changes: into an existing one, or one of several equal ones."""
    message, after = "", dict(before)
    try:
        after = reading()
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert len({key for key, _ in before.items() ^ after.items()}) <= 2
    assert len(after.keys() - before.keys()) <= 1


@pytest.mark.parametrize(
    ("header", "line"),
    [
        ("M,N,K,biaz", "seen.csv:1: no such column 'biaz'; did you mean 'bias'"),
        ("M,N,K,bis", "no such column 'bis'"),
        ("family,M,N,K,bias,remark", "no such column 'remark'"),
        ("familz,M,N,K,bias,op,layout", "no such column 'familz'"),
    ],
)
def test_a_misspelt_column_is_reported(header: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "seen.csv").write_text(f"{header}\n{','.join('1' for _ in header.split(','))}\n")
    with pytest.raises(UserError, match=line):
        read(csv_source, tmp_path / "seen.csv")


def test_a_misspelt_family_is_reported(tmp_path: Path) -> None:
    (tmp_path / "seen.csv").write_text("family,M,N,K\na16w16,1,2,3\na16w17,1,2,3\n")
    with pytest.raises(UserError, match=r"seen.csv:3: column family: 'a16w17'; did you mean 'a16w16'"):
        read(csv_source, tmp_path / "seen.csv")
