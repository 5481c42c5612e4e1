"""Triton JSON and the engines' JSON: names, contents, kept entries, refused files."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmpipe.core.data import Candidate, Device, Scalar
from gemmpipe.core.errors import UserError
from gemmpipe.core.events import Event, Events
from gemmpipe.core.schema import SELECTIONS
from gemmpipe.family import Experts, Family, GemmSpec, KernelDefaults
from gemmpipe.family.problem import make_problem
from gemmpipe.formats import Target
from gemmpipe.formats.engine_json import EngineJson, Sglang, Vllm
from gemmpipe.formats.triton_json import TritonJson, read_buckets, render_buckets

DATA = Path(__file__).parents[3] / "shared" / "data"
Selected = tuple[str, int, int, int, Mapping[str, object]]
KNOBS: dict[str, Scalar] = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "NUM_KSPLIT": 1,
    "cache_modifier": "",
    "num_warps": 4,
    "num_stages": 3,
}


@pytest.fixture
def emitted() -> list[Event]:
    return []


@pytest.fixture
def target(tmp_path: Path, h200: Device, emitted: list[Event]) -> Target:
    events = Events(listeners=[emitted.append])
    return Target(folder=tmp_path, device=h200, run_id="r1", provenance={"torch": "2.13"}, events=events)


def _chosen(form: str, *rows: Selected) -> pd.DataFrame:
    """(bucket, bucket_low, N, K, changed knobs or columns) of each selection."""
    found = []
    for bucket, low, n, k, change in rows:
        knobs = KNOBS | {name: value for name, value in change.items() if name.isupper() or name.startswith("num_")}
        columns = {name: value for name, value in change.items() if name in (*SELECTIONS, "bias", "dtype", "outdtype")}
        row = {"format": form, "bucket": bucket, "bucket_low": low, "M": None, "N": n, "K": k, "libtype": "triton"}
        found.append({"gfx": "sm_90", "cu_num": 132, "weight": 1.0, "config": json.dumps(knobs), **row, **columns})
    own = {"format": "", "bucket": "", "M": 1, "N": 2, "K": 3, "libtype": "torch", "config": "{}"}
    return pd.DataFrame([own, *found])


def test_presets_and_own_buckets(blockscale: Family) -> None:
    def ranges(buckets: object) -> list[tuple[str, int, int | None]]:
        form = TritonJson(device_name=None, buckets=buckets)  # type: ignore[arg-type]
        return [(b.name, b.low, b.high) for b in form.buckets(blockscale, range(1, 20_000))]

    assert ranges("aiter") == [("small_M", 0, 256), ("medium_M", 256, 2048), ("large_M", 2048, None)]
    assert ranges("m_leq")[:3] == [("M_LEQ_1", 0, 1), ("M_LEQ_4", 1, 4), ("M_LEQ_8", 4, 8)]
    assert ranges("m_leq")[-2:] == [("M_LEQ_8192", 4096, 8192), ("any", 8192, None)]
    assert [name for name, _, _ in ranges("atomic")] == [
        "small",
        "medium_M32",
        "medium_M64",
        "medium_M128",
        "large",
        "xlarge",
    ]
    assert ranges({"small": 64, "rest": None}) == [("small", 0, 64), ("rest", 64, None)]
    atomic = TritonJson(device_name=None, buckets="atomic")
    (bucket,) = atomic.buckets(blockscale, [64])
    assert (bucket.name, bucket.required_knobs) == ("medium_M64", (("BLOCK_SIZE_M", 64),))


@pytest.mark.parametrize(
    ("buckets", "line"),
    [
        ("aitre", "did you mean 'aiter'"),
        ({}, "empty, expected"),
        ({"a": 64, "b": 64}, "buckets.b: 64, expected a whole number above"),
        ({"a": None, "b": 64}, "null only at the end"),
        ({"a": "x"}, "buckets.a: x, expected"),
    ],
)
def test_wrong_buckets(buckets: object, line: str) -> None:
    with pytest.raises(UserError, match=line):
        TritonJson(device_name=None, buckets=buckets)  # type: ignore[arg-type]


def test_triton_json_and_its_default_file(target: Target, blockscale: Family) -> None:
    form = TritonJson(device_name="R9700", buckets="aiter")
    rows: tuple[Selected, ...] = (
        ("small_M", 0, 1280, 8192, {}),
        ("large_M", 2048, 1280, 8192, {"BLOCK_SIZE_M": 128}),
        ("small_M", 0, 7168, 8192, {"num_warps": 8}),
        ("small_M", 0, 8192, 1024, {"num_warps": 8}),
    )
    paths = form.write(blockscale, _chosen("triton_json", *rows), target)
    assert [path.name for path in paths] == [
        "R9700-GEMM-SMALLBLOCK-N=1280-K=8192.json",
        "R9700-GEMM-SMALLBLOCK-N=7168-K=8192.json",
        "R9700-GEMM-SMALLBLOCK-N=8192-K=1024.json",
        "R9700-GEMM-SMALLBLOCK.json",
    ]
    assert json.loads(paths[0].read_text()) == {"small_M": KNOBS, "large_M": KNOBS | {"BLOCK_SIZE_M": 128}}
    default = json.loads(paths[-1].read_text())
    assert default == {"small_M": KNOBS | {"num_warps": 8}, "large_M": KNOBS | {"BLOCK_SIZE_M": 128}}
    form.write(blockscale, _chosen("triton_json", ("medium_M", 256, 1280, 8192, {"num_stages": 4})), target)
    merged = json.loads(paths[0].read_text())
    assert list(merged) == ["small_M", "medium_M", "large_M"]
    assert merged["small_M"] == KNOBS


def test_the_architecture_names_the_file(target: Target, blockscale: Family) -> None:
    form = TritonJson(device_name=None, buckets="aiter")
    path, _ = form.write(blockscale, _chosen("triton_json", ("small_M", 0, 16, 32, {})), target)
    assert path.name == "sm_90-GEMM-SMALLBLOCK-N=16-K=32.json"
    with pytest.raises(UserError, match=r"device_name: '../x'"):
        TritonJson(device_name="../x", buckets="aiter")


def test_one_file_for_several_dtypes_holds_the_busiest(target: Target, sixteen: Family, emitted: list[Event]) -> None:
    form = TritonJson(device_name=None, buckets="aiter")
    plain = {"dtype": "bfloat16", "outdtype": "bfloat16", "bias": False}
    rows: tuple[Selected, ...] = (
        ("small_M", 0, 16, 32, {**plain, "weight": 2.0}),
        ("small_M", 0, 16, 32, {**plain, "bias": True, "weight": 5.0, "num_warps": 8}),
    )
    path, _ = form.write(sixteen, _chosen("triton_json", *rows), target)
    assert json.loads(path.read_text())["small_M"]["num_warps"] == 8
    assert [(e.kind, e.text[:26]) for e in emitted] == [("warning", "N=16,K=32: one file for se")]


def test_a_file_broken_by_hand_stays(target: Target, blockscale: Family) -> None:
    form = TritonJson(device_name=None, buckets="aiter")
    path = target.folder / "sm_90-GEMM-SMALLBLOCK-N=16-K=32.json"
    path.write_text('{"small_M": {"BLOCK_SIZE_M": 16,}}')
    with pytest.raises(UserError, match=r"K=32.json:1:\d+: no JSON"):
        form.write(blockscale, _chosen("triton_json", ("small_M", 0, 16, 32, {})), target)
    assert path.read_text() == '{"small_M": {"BLOCK_SIZE_M": 16,}}'
    path.write_text('{"small_M": 3}')
    with pytest.raises(UserError, match="'small_M': expected an object of knobs"):
        form.write(blockscale, _chosen("triton_json", ("small_M", 0, 16, 32, {})), target)


@pytest.mark.parametrize(("form", "blank"), [(Vllm(device_name=None), ""), (Sglang(device_name=None), " ")])
def test_engine_files(form: EngineJson, blank: str, target: Target, blockscale: Family) -> None:
    rows: tuple[Selected, ...] = (("64", 63, 1280, 8192, {}), ("1", 0, 1280, 8192, {"num_stages": 5}))
    (path,) = form.write(blockscale, _chosen(form.name, *rows), target)
    assert path.parent == target.folder / form.name
    assert path.name == f"N=1280,K=8192,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,{blank}128].json"
    body = {
        "BLOCK_SIZE_M": 16,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 128,
        "GROUP_SIZE_M": 1,
        "num_warps": 4,
        "num_stages": 3,
    }
    assert path.read_text() == json.dumps({"1": body | {"num_stages": 5}, "64": body}, indent=4) + "\n"
    assert [p.name for p in path.parent.glob("N=*")] == [path.name]
    assert json.loads((path.parent / f"{form.name}.meta.json").read_text())["runs"]["r1"] == {"torch": "2.13"}
    form.write(blockscale, _chosen(form.name, ("8", 7, 1280, 8192, {"num_warps": 8})), target)
    assert list(form.read(path)) == ["1", "8", "64"]


def test_buckets_of_an_engine(blockscale: Family, sixteen: Family) -> None:
    found = Vllm(device_name=None).buckets(blockscale, [64, 1])
    assert [(b.name, b.low, b.high) for b in found] == [("1", 0, 1), ("64", 63, 64)]
    assert found[0].accepts(Candidate.of("triton", KNOBS))
    assert not found[0].accepts(Candidate.of("triton", KNOBS | {"NUM_KSPLIT": 4}))
    assert not found[0].accepts(Candidate.of("torch", {}))
    assert Vllm(device_name=None).buckets(sixteen, [1]) == ()


def test_amds_knobs_and_device_name(target: Target, blockscale: Family) -> None:
    form = Vllm(device_name="AMD Instinct MI300X")
    frame = _chosen("vllm", ("1", 0, 16, 128, {}))
    amd = {"kpack": 2, "matrix_instr_nonkdim": 16, "waves_per_eu": 0}
    frame["config"] = json.dumps(KNOBS | amd)
    (path,) = form.write(blockscale, frame, target)
    assert "device_name=AMD_Instinct_MI300X," in path.name
    assert form.read(path)["1"].items() >= amd.items()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"NUM_KSPLIT": 4}, "the engine's kernel has no NUM_KSPLIT=4"),
        ({"BLOCK_SIZE_K": 256}, "BLOCK_SIZE_K 256 does not fit into a group of 128"),
        ({"KERNEL_TYPE": "gluon"}, "has no KERNEL_TYPE=gluon"),
        ({"libtype": "torch"}, "has no candidate of torch"),
    ],
)
def test_candidates_of_another_form_are_not_stored(
    change: dict[str, object], reason: str, target: Target, blockscale: Family, emitted: list[Event]
) -> None:
    assert Vllm(device_name=None).write(blockscale, _chosen("vllm", ("1", 0, 16, 128, change)), target) == []
    (event,) = emitted
    assert (event.kind, reason in event.text) == ("warning", True)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"_meta": KNOBS}, "'_meta': expected an M"),
        ({"1": {**KNOBS}}, "vllm passes all knobs to its kernel, which has no 'NUM_KSPLIT'"),
        ({"1": {"BLOCK_SIZE_M": 16}}, "no BLOCK_SIZE_N, which the kernel needs"),
    ],
)
def test_the_reader_refuses_what_fails_at_load(body: dict[str, object], line: str, tmp_path: Path) -> None:
    path = tmp_path / "N=1,K=1,device_name=x,dtype=fp8_w8a8,block_shape=[128,128].json"
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match=line):
        Vllm(device_name=None).read(path)


@pytest.mark.parametrize(
    ("m", "knob", "value", "message"),
    [
        ("9" * 5000, None, None, "expected an M from 1 to 2147483647"),
        ("\u0663", None, None, "expected an M from 1"),
        ("2147483648", None, None, "expected an M from 1"),
        *(("1", "BLOCK_SIZE_M", value, "expected a whole number") for value in (True, 0, -64, 10**30, 1.5, "16", None)),
        ("1", "num_stages", -1, "expected a whole number from 0 to 65536"),
        ("1", "BLOCK_SIZE_M", {}, "expected one value"),
        ("1", "y" * 90_000, 1, "passes all knobs to its kernel, which has no"),
    ],
    ids=lambda each: str(each)[:20],
)
def test_knobs_and_ms_that_no_kernel_takes(
    m: str, knob: str | None, value: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "N=1,K=1,device_name=x,dtype=fp8_w8a8,block_shape=[128,128].json"
    knobs = {name: size for name, size in KNOBS.items() if name not in ("NUM_KSPLIT", "cache_modifier")}
    path.write_text(json.dumps({m: knobs | ({knob: value} if knob else {})}))
    with pytest.raises(UserError, match=message) as caught:
        Vllm(device_name=None).read(path)
    assert len(str(caught.value).replace(str(path), "")) <= 500


def test_an_empty_file_of_buckets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UserError, match=r"x\.json: an empty object, expected"):
        read_buckets(tmp_path / "x.json")


_VALUE = (
    st.none()
    | st.booleans()
    | st.integers(-(2**16), 2**16)
    | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False)
)


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.dictionaries(st.text(max_size=8), _VALUE, min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    )
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, buckets: dict[str, dict[str, str | int | float | bool | None]]
) -> None:
    path = tmp_path_factory.mktemp("buckets") / "x.json"
    path.write_text(render_buckets(buckets), encoding="utf-8")
    assert read_buckets(path) == buckets


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.integers(1, 8192),
        st.fixed_dictionaries(
            {name: st.integers(1, 128) for name in KNOBS if name not in ("NUM_KSPLIT", "cache_modifier")}
        ),
        min_size=1,
        max_size=5,
    )
)
def test_engine_files_hold_what_was_selected(
    tmp_path_factory: pytest.TempPathFactory, h200: Device, blockscale: Family, found: dict[int, dict[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("engine")
    target = Target(folder=folder, device=h200, run_id="r", provenance={}, events=Events())
    good = {m: knobs | {"BLOCK_SIZE_K": 64} for m, knobs in found.items()}
    frame = _chosen("sglang", *((str(m), m - 1, 16, 128, dict(knobs)) for m, knobs in good.items()))
    form = Sglang(device_name=None)
    (path,) = form.write(blockscale, frame, target)
    assert form.read(path) == {str(m): knobs for m, knobs in good.items()}


@settings(max_examples=300)
@given(place=st.floats(0, 1, exclude_max=True), byte=st.sampled_from(b' ,":{}[]\n0159xT.-_\\\xff'))
def test_a_changed_byte_is_refused_or_changes_one_value(
    tmp_path_factory: pytest.TempPathFactory, place: float, byte: int
) -> None:
    form = Vllm(device_name=None)
    body = {knob: KNOBS[knob] for knob in form.accepted if knob in KNOBS}
    sound = {"1": body, "64": body | {"num_stages": 5}}
    raw = bytearray(render_buckets(sound).encode())
    raw[int(place * len(raw))] = byte
    path = tmp_path_factory.mktemp("engine") / "N=16,K=128,device_name=x,dtype=fp8_w8a8,block_shape=[128,128].json"
    path.write_bytes(bytes(raw))
    try:
        found = form.read(path)
    except UserError:
        return
    assert len(found) == 2
    changed = [
        (m, knob)
        for m, other in zip(sound, found, strict=True)
        for knob in body
        if sound[m][knob] != found[other].get(knob)
    ]
    assert len(changed) + (list(found) != list(sound)) <= 1


@pytest.mark.skipif(not (DATA / "vllm").exists(), reason="collected files of the engines not here")
def test_the_engines_own_files(tmp_path: Path) -> None:
    for path in (DATA / "vllm").glob("N=*"):
        name = path.name
        if "N=7168,K=128," in name and "MI300X" in name:
            with pytest.raises(UserError, match="BLOCK_SIZE_K 256 does not fit into a group of 128"):
                Vllm(device_name=None).read(path)
        else:
            assert Vllm(device_name=None).read(path)
    for path in (DATA / "sglang").glob("N=*block_shape*"):
        copy = shutil.copy(path, tmp_path / path.name)
        assert Sglang(device_name=None).read(Path(copy))


@pytest.mark.skipif(not (DATA / "aiter").exists(), reason="collected data of aiter not here")
def test_aiters_own_files() -> None:
    for path in (DATA / "aiter").glob("gfx*-GEMM-*.json"):
        found = read_buckets(path)
        assert json.loads(render_buckets(found)) == found


def test_entries_as_sglang_ships_them_are_read(tmp_path: Path, h200: Device, blockscale: Family) -> None:
    form = Sglang(device_name=None)
    knobs = {name: value for name, value in KNOBS.items() if name.startswith(("BLOCK", "GROUP"))}
    path = tmp_path / "N=128,K=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
    path.write_text(json.dumps({"8": knobs | {"num_warps": None, "USE_TMA": True}, "64": knobs | {"SWAP_AB": True}}))
    assert form.read(path) == {"8": knobs | {"USE_TMA": True}, "64": knobs | {"SWAP_AB": True}}
    values = {"M": 8, "N": 128, "K": 256}
    problem = make_problem(blockscale, values, KernelDefaults(dtype=None, out_dtype=None, bias=None), "sm_90", "x")
    found = form.entries(blockscale.spec(problem), h200, [tmp_path])
    assert found[8] == {"num_warps": 4, "num_stages": 3, **knobs}
    path.write_text(json.dumps({"8": knobs | {"USE_TMA": 1.5}}))
    with pytest.raises(UserError, match="USE_TMA"):
        form.read(path)


def test_experts_files_of_the_h200_family_have_one_name(sixteen: Family) -> None:
    experts = Experts(count=8, topk=2, inner=512, activation="silu", gated=True)
    spec = GemmSpec(m=1, n=1, k=1, x_dtype="bfloat16", w_dtype="bfloat16", out_dtype="bfloat16", experts=experts)
    assert Vllm(device_name=None).file_name(spec, "NVIDIA_H200_NVL") == "E=8,N=512,device_name=NVIDIA_H200.json"
    assert "device_name=NVIDIA_H200_NVL" in Sglang(device_name=None).file_name(spec, "NVIDIA_H200_NVL")
