"""aiter's tables of fused experts with every published header; native ones with aiter's columns; engines' files."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from gemmpipe.core.data import Candidate, Device, Problem
from gemmpipe.core.device import arch_device
from gemmpipe.core.errors import UserError
from gemmpipe.core.events import Events
from gemmpipe.family import KernelDefaults, aiter_table, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.formats import Target
from gemmpipe.formats.engine_json import EngineJson, Sglang, Vllm
from gemmpipe.formats.native import NativeCsv
from gemmpipe.runtime.select import usable_candidate
from gemmpipe.sources.table import CsvShapes as Tables
from gemmpipe.tables import store
from gemmpipe.tables.recorded import UnusableRow

FMOE = load_family("fmoe")
KEY = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
STAGES = "block_m,ksplit,us1,kernelName1,err1,us2,kernelName2,err2,us,run_1stage"
FP8 = "torch.bfloat16,torch.float8_e4m3fnuz,torch.float8_e4m3fnuz"
DEFAULTS = KernelDefaults(dtype=None, out_dtype=None, bias=None)
HEADERS = {
    "without gfx, xbf16 and flat": (
        f"cu_num,{KEY},{STAGES},tflops,bw,_tag",
        f"80,4,2304,1536,8,2,ActivationType.Gelu,{FP8},QuantType.per_Token,1,1,32,0,17.8,asm1,0.0%,14.5,ck2,0.3%,32.3,0,5.2,2629.4,",
    ),
    "newest": (
        f"gfx,cu_num,{KEY},{STAGES},xbf16,flat,tflops,bw,_tag",
        f"gfx942,304,1,6144,256,257,9,ActivationType.Silu,{FP8},QuantType.per_1x128,1,0,32,0,67.3,one,0.0%,0.0,,0.0%,67.3,1,0,0,1.2,17997.2,",
    ),
    "without gfx": (
        f"cu_num,{KEY},{STAGES},xbf16,flat,tflops,bw,_tag",
        f"256,8,2304,1536,8,2,ActivationType.Swiglu,{FP8},QuantType.per_1x128,1,0,32,0,1,a,1%,2,b,2%,3.5,0,1,1,5.2,2629.4,x",
    ),
    "tflops before xbf16": (
        f"cu_num,{KEY},{STAGES},tflops,bw,xbf16,_tag",
        "80,8,2048,192,128,8,ActivationType.Silu,torch.bfloat16,torch.bfloat16,torch.bfloat16,QuantType.No,1,0,32,0,38.1,c1,0.0%,34.1,c2,0.0%,72.3,0,4.1,4174.6,0,",
    ),
    "without flat": (
        f"cu_num,{KEY},{STAGES},xbf16,tflops,bw,_tag",
        "256,1,7168,512,384,8,ActivationType.Silu,torch.bfloat16,torch.bfloat16,torch.int4,QuantType.per_1x32,1,0,16,0,18.1,f1,0.1%,17.6,f2,2.3%,35.8,0,0,4.9,58931.2,",
    ),
    "without _tag": (
        f"gfx,cu_num,{KEY},{STAGES},xbf16,flat,tflops,bw",
        f"gfx950,256,4,4096,384,128,8,ActivationType.Silu,{FP8},QuantType.per_Tensor,1,1,32,0,83.7,c1,0.0%,64.4,c2,0.0%,148.1,0,0,0,8.1,4077.2",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_aiters_rows_are_read(name: str, tmp_path: Path) -> None:
    header, line = HEADERS[name]
    path = tmp_path / "tuned_fmoe.csv"
    path.write_text(f"{header.replace(',', ', ')}\n{line.replace(',', ', ')}\n")
    (row,) = store.read(path, FMOE)
    cells = dict(zip(header.split(","), line.split(","), strict=True))
    for column in ("token", "model_dim", "inter_dim", "expert", "topk", "cu_num", "use_g1u1", "doweight_stage1"):
        assert row[column] == int(cells[column])
    for column in ("us", "tflops", "bw"):
        assert row[column] == float(cells[column])
    for column in ("act_type", "q_type", "block_m", "kernelName1"):
        assert row[column] == cells[column]
    assert row["gfx"] == {"80": "gfx942", "256": "gfx950", "304": "gfx942"}[cells["cu_num"]]
    assert FMOE.aiter_table is not None
    written = aiter_table.render([row], FMOE.aiter_table, ("dtype", "q_dtype_a", "q_dtype_w")).splitlines()
    again = dict(zip(written[0].split(","), written[1].split(","), strict=True))
    for column, cell in cells.items():
        assert again[column] in (cell, str(row[column])), column


def test_a_row_without_a_time_wins_nothing(tmp_path: Path) -> None:
    header, line = HEADERS["newest"]
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n{line.replace('67.3,1,0,0', '0.0,1,0,0')}\n")
    assert store.read(path, FMOE) == []


def test_an_untuned_table_gives_problems(tmp_path: Path) -> None:
    path = tmp_path / "untuned_fmoe.csv"
    lines = [f"512, 6144, 4096, 8, 2, ActivationType.Silu, torch.bfloat16, {q}, 1, 0" for q in (
        "torch.bfloat16, torch.bfloat16, QuantType.No",
        "torch.float8_e4m3fn, torch.float8_e4m3fn, QuantType.per_1x128",
    )]  # fmt: skip
    path.write_text("\n".join([KEY.replace(",", ", "), *lines]) + "\n")
    found = Tables(path=str(path), rows_of=None).problems(FMOE, DEFAULTS, "sm_90")
    assert [p["q_type"] for p in found] == ["QuantType.No", "QuantType.per_1x128"]
    assert [p.rows for p in found] == [512, 512]
    source = Tables(path=str(path), rows_of=None)
    path.write_text("\n".join([KEY, *lines, "4,64,64,8,2,Silu,bf16,int8,int8,QuantType.per_Tensor,1,0"]) + "\n")
    assert source.problems(FMOE, DEFAULTS, "sm_90") == found
    skipped = source.left_out(FMOE, DEFAULTS, "sm_90")
    assert skipped.startswith(
        f"1 row, the first: {path}:4: fmoe: q_type: 'QuantType.per_Tensor' is not computed, expected "
    )
    path.write_text(f"{KEY}\n512,6144,4096,8,2,ActivationType.Silu,torch.bfloat16,torch.bfloat16,int4,per_1x32,1,0\n")
    with pytest.raises(
        UserError, match=r"_fmoe.csv:2: .*q_type: 'QuantType.per_1x32' is not computed, expected QuantType.No"
    ):
        Tables(path=str(path), rows_of=None).problems(FMOE, DEFAULTS, "sm_90")


KNOBS = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}
KNOBS |= {"num_stages": 3, "cache_modifier": ""}


@pytest.fixture
def target(tmp_path: Path) -> Target:
    device: Device = replace(arch_device("sm_90"), name="NVIDIA H200", cu_num=132)
    return Target(folder=tmp_path, device=device, run_id="r1", provenance={}, events=Events())


def problem_of(m: int, dtype: str | None = None, **key: object) -> Problem:
    """A problem of Qwen3-30B-A3B's experts."""
    sizes = {"token": m, "model_dim": 2048, "inter_dim": 768, "expert": 128, "topk": 8, **key}
    return make_problem(FMOE, sizes, KernelDefaults(dtype=dtype, out_dtype=None, bias=None), "sm_90", "test")


def chosen(form: str, knobs: dict[str, object], dtype: str | None = None, **key: object) -> "pd.DataFrame":
    """Selections for M 1 and 64 of Qwen3-30B-A3B's experts, in buckets of one M each, or as the problems' own."""
    rows = []
    for m in (1, 64):
        problem = problem_of(m, dtype, **key)
        row = {**dict(problem.key), "problem": problem.id, "format": form, "bucket": str(m) if form else ""}
        row |= {"bucket_low": m - 1, "bucket_high": m, "gfx": "sm_90", "cu_num": 132, "libtype": "triton", "us": 9.5}
        row |= {"config": json.dumps({**knobs, "BLOCK_SIZE_M": 16 if m == 1 else 64}), "weight": 1.0}
        row |= {"kernelName": "experts@abcd1234", "policy": "p", "run_id": "r1", "solidx": 0, "splitK": 1}
        if form:
            row["token"] = None
        rows.append(row)
    return pd.DataFrame(rows)


def test_our_table_has_aiters_columns(target: Target) -> None:
    frame = chosen("", {**KNOBS, "BLOCK_SIZE_N_2": 128, "FUSED_ACT": True})
    (path,) = NativeCsv(file=None, sort=True).write(FMOE, frame, target)
    assert path.name == "tuned_fmoe.csv"
    assert NativeCsv(file=None, sort=True).write(FMOE, frame.assign(us=8.5), target) == [
        path
    ]  # merged into the existing table
    assert NativeCsv(file=None, sort=True).write(FMOE, frame, target) == [path]
    header, first, second = path.read_text().splitlines()
    assert header.startswith(f"gfx,cu_num,{KEY},libtype,")
    row = store.read(path, FMOE)[1]
    assert (row["block_m"], row["ksplit"], row["us1"], row["us"]) == ("64", "0", None, 9.5)
    assert row["kernelName1"] == "routed1_fused_64x64x128_w4_s3@abcd1234"
    assert row["kernelName2"] == "routed2_64x128x128_w4_s3@abcd1234"
    assert ",torch.bfloat16,torch.bfloat16,torch.bfloat16,QuantType.No,1,0,triton," in first
    assert second.startswith("sm_90,132,64,2048,768,128,8,ActivationType.Silu,")


GROUPED = {"kernel_type": "warp_specialised", "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
GROUPED |= {"num_stages": 4, "FUSED_ACT": True, "BLOCK_SIZE_N_2": 128}


def test_rows_of_the_grouped_kernel_are_stored_and_run_as_they_are(target: Target) -> None:
    kernel, spec = FMOE.implementations[1], FMOE.spec(problem := problem_of(64))
    knobs = kernel.normalise(spec, {**GROUPED, "BLOCK_SIZE_M": 64}, target.device)  # type: ignore[dict-item]
    assert kernel.unsupported_reason(spec, knobs, target.device) is None
    named = {"libtype": "gluon", "kernelName": kernel.kernel_name(knobs)}
    (path,) = NativeCsv(file=None, sort=True).write(FMOE, chosen("", GROUPED).assign(**named), target)
    row = next(row for row in store.read(path, FMOE) if row["token"] == problem["token"])
    source = kernel.kernel_name(knobs).split("@")[1]
    assert row["kernelName1"] == f"grouped1_fused_64x256x64_s4@{source}"
    assert row["kernelName2"] == f"grouped2_64x128x64_s4@{source}"
    assert usable_candidate(FMOE, row, spec, target.device).candidate == Candidate.of("gluon", knobs)
    for writer in (Vllm(device_name=None), Sglang(device_name=None)):
        assert not writer.buckets(FMOE, [64])[0].accepts(Candidate.of("gluon", knobs))
        assert writer.write(FMOE, chosen(writer.name, GROUPED).assign(**named), target) == []


NAMES: dict[tuple[str, str], str] = {
    ("vllm", "none"): "vllm/E=128,N=768,device_name=NVIDIA_H200.json",
    ("vllm", "block"): "vllm/E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
    ("vllm", "per_token"): "vllm/E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8.json",
    ("sglang", "none"): "E=128,N=768,device_name=NVIDIA_H200.json",
    ("sglang", "block"): "E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json",
    ("sglang", "per_token"): "E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True.json",
}


@pytest.mark.parametrize(("form", "quantised"), NAMES)
def test_engines_find_their_files(form: str, quantised: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmpipe.formats.engine_json.metadata.version", lambda name: "3.6.0+git1")
    writer: EngineJson = Vllm(device_name=None) if form == "vllm" else Sglang(device_name=None)
    dtype = None if quantised == "none" else "fp8"
    knobs = KNOBS if form == "vllm" else {**KNOBS, "BLOCK_SIZE_N_2": 128, "num_stages_2": 4}
    paths = writer.write(FMOE, chosen(form, dict(knobs), dtype, q_type=quantised), target)
    names = [str(path.relative_to(target.folder)) for path in paths]
    plain = {k: v for k, v in KNOBS.items() if k != "cache_modifier"}
    if form == "vllm":
        assert names == [NAMES[form, quantised]]
    else:
        stem = f"sglang/configs/triton_3_6_0/{NAMES[form, quantised]}"
        assert names == [stem, stem.replace(".json", "_down.json")]
        down = json.loads(paths[1].read_text())
        assert down["64"] == {**plain, "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "num_stages": 4}
    body = json.loads(paths[0].read_text())
    assert body == {"1": plain, "64": {**plain, "BLOCK_SIZE_M": 64}}
    assert writer.read(paths[0]) == body


@pytest.mark.parametrize("odd", [{"FUSED_ACT": True}, {"OVERLAP": True}, {"BLOCK_SIZE_N_2": 128}])
def test_vllm_gets_what_its_kernel_can_run(odd: dict[str, object], target: Target) -> None:
    writer = Vllm(device_name=None)
    buckets = writer.buckets(FMOE, [1, 64])
    assert [b.name for b in buckets] == ["1", "64"]
    plain = Candidate.of("triton", KNOBS)  # type: ignore[arg-type]
    assert buckets[0].accepts(plain)
    assert not buckets[0].accepts(Candidate.of("triton", {**KNOBS, **odd}))  # type: ignore[dict-item]
    assert Sglang(device_name=None).buckets(FMOE, [1])[0].accepts(
        Candidate.of("triton", {**KNOBS, **odd})  # type: ignore[dict-item]
    ) == ("BLOCK_SIZE_N_2" in odd)
    assert writer.write(FMOE, chosen("vllm", {**KNOBS, **odd}), target) == []


def test_two_models_with_one_file_name_keep_the_more_called(target: Target) -> None:
    other = chosen("vllm", {**KNOBS, "num_warps": 8}, model_dim=4096).assign(weight=3.0)
    lines: list[str] = []
    target.events.listeners.append(lambda event: lines.append(event.text))
    (path,) = Vllm(device_name=None).write(FMOE, pd.concat([chosen("vllm", dict(KNOBS)), other]), target)
    assert {m: knobs["num_warps"] for m, knobs in json.loads(path.read_text()).items()} == {"1": 8, "64": 8}
    name = "E=128,N=768,device_name=NVIDIA_H200.json"
    line = f"{name}: one file for several products; the one with the most calls is stored"
    assert lines == [line, line]


def test_a_file_of_vllms_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    plain = {k: v for k, v in KNOBS.items() if k != "cache_modifier"}
    path.write_text(json.dumps({"triton_version": "3.5.1", "1": plain, "4": {**plain, "BLOCK_SIZE_K": 256}}))
    assert list(Vllm(device_name=None).read(path)) == ["1", "4"]


def test_rows_of_a_library_with_tiles_are_stored_and_run_where_it_is(target: Target) -> None:
    """DeepGEMM's tiles have no BLOCK_SIZE_K: the package determines it."""
    tile: dict[str, object] = {"BLOCK_SIZE_N": 128, "BLOCK_SIZE_N_2": 160}
    named = {"libtype": "deepgemm", "kernelName": "deepgemm_grouped_64x128_160"}
    frame = chosen("", tile, "fp8").assign(**named)
    (path,) = NativeCsv(file=None, sort=True).write(FMOE, frame, target)
    row = store.read(path, FMOE)[1]
    assert (row["block_m"], row["kernelName1"], row["kernelName2"]) == ("64", *2 * [named["kernelName"]])
    with pytest.raises(UnusableRow, match="backend: deepgemm: "):
        usable_candidate(FMOE, row, FMOE.spec(problem_of(64, "fp8")), target.device)
