"""Profiler traces: nested operators once, custom operators, times of kernels, and corrupt traces."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from gemmpipe.core.data import Problem
from gemmpipe.core.errors import UserError
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.sources.profile import TraceShapes

DATA = Path(__file__).parents[3] / "shared" / "data" / "captures"
NOTHING = KernelDefaults(dtype=None, out_dtype=None, bias=None)
FP8, BF16, FLOAT = "c10::Float8_e4m3fn", "c10::BFloat16", "float"


def source(path: Path, nsets: object = None, rows_of: str | None = None) -> TraceShapes:
    return TraceShapes(path=str(path), nsets=nsets, rows_of=rows_of)  # type: ignore[arg-type]


def problems(path: Path, family: str, **more: object) -> list[Problem]:
    return source(path, **more).problems(load_family(family), NOTHING, "sm_90")  # type: ignore[arg-type]


def sizes(path: Path, family: str, **more: object) -> list[tuple[object, ...]]:
    return [(p["M"], p["N"], p["K"], p.weight) for p in problems(path, family, **more)]


def op(
    name: str, start: float, dur: float, *operands: tuple[str, Sequence[object]], **args: object
) -> dict[str, object]:
    shapes = {"Input type": [kind for kind, _ in operands], "Input Dims": [list(dims) for _, dims in operands]}
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": start,
        "dur": dur,
        "args": shapes | args,
    }


def tensors(*dims: int) -> tuple[str, Sequence[object]]:
    return "TensorList", [list(dims)]


def kernel(external: int, dur: float) -> dict[str, object]:
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": 9e3, "dur": dur, "args": {"External id": external}}


def write(path: Path, *events: Mapping[str, object]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_what_the_profiler_writes_here(tmp_path: Path) -> None:
    linear = torch.nn.Linear(32, 64).bfloat16()
    x = torch.ones(2, 3, 32).bfloat16()
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
        linear(x), linear(x)
        x @ x.mT
        torch.nn.functional.linear(x[0, 0], linear.weight)
        torch._int_mm(torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 8, dtype=torch.int8))
        torch.ones(3, 4) @ torch.ones(4, 5)
    profile.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    found = {(p["M"], p["N"], p["K"], p["bias"]): p.weight for p in problems(tmp_path / "trace.json.gz", "a16w16")}
    assert found == {(6, 64, 32, True): 2.0, (1, 64, 32, False): 1.0}
    assert [p["B"] for p in problems(tmp_path / "trace.json.gz", "batched_bf16")] == [2]
    assert [p["q_dtype_w"] for p in problems(tmp_path / "trace.json.gz", "a8w8")] == ["int8"]
    left = source(tmp_path / "trace.json.gz").left_out(load_family("a16w16"), NOTHING, "sm_90")
    assert set(left.split(", ")) == {"1 of batched_bf16", "1 of a8w8", "1 of other"}
    times = source(tmp_path / "trace.json.gz").recorded_us(load_family("a16w16"), NOTHING, "sm_90")
    assert len(times) == 2
    assert all(time_us > 0 for time_us in times.values())


@pytest.mark.skipif(not DATA.exists(), reason="collected capture not here")
def test_the_collected_trace() -> None:
    path = DATA / "torch_profiler_record_shapes_torch2.13_cpu.json"
    assert {(p["M"], p["N"], p["K"], p["bias"], p.weight) for p in problems(path, "a16w16")} == {
        (7, 384, 256, False, 2.0),
        (7, 384, 256, True, 1.0),
    }
    assert sizes(path, "a8w8_blockscale") == [(7, 384, 256, 1.0)]
    assert sizes(path, "batched_bf16") == [(7, 384, 256, 1.0)]
    assert [p["granularity"] for p in problems(path, "a8w8")] == ["tensor"]


def test_engines_own_operators(tmp_path: Path) -> None:
    x, w = (FP8, [7, 512]), (FP8, [384, 512])
    blocks = ((FLOAT, [7, 4]), (FLOAT, [3, 4]), ("ScalarList", []), ("Scalar", []))
    path = write(
        tmp_path / "t.json",
        op(
            "vllm::w8a8_triton_block_scaled_mm_func",
            0,
            9,
            x,
            w,
            *blocks,
            **{"Concrete Inputs": [*[""] * 4, "[]", "15"]},
        ),
        op("aten::mm", 2, 3, (BF16, [7, 512]), (BF16, [512, 384])),  # within: a part of the outer product
        op(
            "_C::cutlass_scaled_mm",
            10,
            9,
            (BF16, [8, 384]),
            (FP8, [8, 512]),
            (FP8, [512, 384]),
            (FLOAT, [8, 1]),
            (FLOAT, [384]),
        ),
        op("vllm::rocm_unquantized_gemm", 20, 9, (BF16, [5, 64]), (BF16, [32, 64]), (BF16, [32])),
        op("vllm::rms_norm", 30, 9, (BF16, [64, 64]), (BF16, [64, 64])),
    )
    assert sizes(path, "a8w8_blockscale") == [(7, 384, 512, 1.0)]
    assert [(p["M"], p["granularity"], p["outdtype"]) for p in problems(path, "a8w8")] == [(8, "row", "bfloat16")]
    assert [(p["M"], p["N"], p["bias"]) for p in problems(path, "a16w16")] == [(5, 32, True)]
    assert sizes(path, "a8w8_blockscale_bpreshuffle", rows_of="a8w8_blockscale") == [(7, 384, 512, 1.0)]


def test_scaled_mm_in_both_versions(tmp_path: Path) -> None:
    x, w = (FP8, [8, 256]), (FP8, [256, 384])
    none, bf16 = ("", []), {"Concrete Inputs": [*[""] * 6, "15", "", "", "15"]}
    path = write(
        tmp_path / "t.json",
        op("aten::_scaled_mm", 0, 9, x, w, (FLOAT, [8, 1]), (FLOAT, [1, 384]), none, none, ("Scalar", []), **bf16),
        op("aten::_scaled_mm", 20, 4, x, w, (FLOAT, [8, 1]), (FLOAT, [1, 384])),  # fp8 out: no family's
        op("aten::_scaled_mm_v2", 10, 9, x, w, tensors(8, 2), none, none, tensors(4, 3), none, none, none, **bf16),
    )
    assert sizes(path, "a8w8") == [(8, 384, 256, 1.0)]
    assert sizes(path, "a8w8_blockscale") == [(8, 384, 256, 1.0)]


def test_kernels_times_belong_to_the_product_that_launched_them(tmp_path: Path) -> None:
    x, w = (BF16, [4, 64]), (BF16, [64, 32])
    path = write(
        tmp_path / "t.json",
        op("aten::linear", 0, 50, x, (BF16, [32, 64]), **{"External id": 1}),
        op("aten::mm", 10, 20, x, w, **{"External id": 2}),
        op("aten::fill_", 12, 2, x, **{"External id": 3}),
        op("aten::mm", 60, 20, (BF16, [8, 64]), w, **{"External id": 4}),
        kernel(2, 7.0),
        kernel(3, 1.0),
        kernel(4, 5.0),
        kernel(9, 100.0),
    )
    times = source(path).recorded_us(load_family("a16w16"), NOTHING, "sm_90")
    assert sorted(times.values()) == [5.0, 8.0]


def test_decode_that_a_graph_hides(tmp_path: Path) -> None:
    w = (BF16, [64, 32])
    events = [op("aten::mm", 10.0 * i, 9, (BF16, [m, 64]), w) for i, m in enumerate([2000, 2000, 48])]
    path = write(tmp_path / "t.json", *events)
    assert sizes(path, "a16w16", nsets=[1, 48]) == [(2000, 32, 64, 2.0), (48, 32, 64, 1.0), (1, 32, 64, 2.0)]
    assert len(sizes(path, "a16w16", nsets="vllm")) == 2 + 51 - 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "no JSON"),
        ("{}", "no list 'traceEvents'"),
        ('{"traceEvents": 3}', "is duplicate or no list"),
        ('{"traceEvents": [3]}', "no object"),
        ('{"traceEvents": []} x', "text after the end"),
        ('{"traceEvents": [{"a": 1}', "no ',' between two objects"),
        ('{"traceEvents": [{"a": ' + "[" * 100_000 + "]" * 100_000 + "}]}", "nested too deep"),
        ("[]", "no product of a16w16"),
    ],
)
def test_what_is_no_trace(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UserError, match=line) as caught:
        problems(tmp_path / "t.json", "a16w16")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, r"event 1 \(aten::mm\): no 'Input Dims' and 'Input type', expected a trace with record_shapes=True"),
        ({"Input Dims": [[1, 2]], "Input type": []}, "two lists of one length"),
        ({"Input Dims": [[1, -2], [2, 3]], "Input type": [BF16, BF16]}, "expected a list of whole numbers"),
        (
            {"Input Dims": [[1, 2], [2, 3]], "Input type": [BF16, BF16], "Input Strides": [[1], [3, 1]]},
            "expected one for",
        ),
        (3, "args: '3', expected an object"),
    ],
)
def test_an_event_that_contradicts_itself(args: object, line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", {**op("aten::mm", 0, 1), "args": args})
    with pytest.raises(UserError, match=line):
        problems(path, "a16w16")


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps({"traceEvents": []}).encode() * 1000)
    (tmp_path / "t.json.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match="cannot be unpacked"):
        problems(tmp_path / "t.json.gz", "a16w16")
    with pytest.raises(UserError, match=r"expected a trace of torch's profiler"):
        TraceShapes(path=(), nsets=None, rows_of=None).problems(load_family("a16w16"), NOTHING, "sm_90")
