"""Checks of engines' files: every kind of error is found, and valid files have none."""

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmpipe.core.data import Device
from gemmpipe.core.errors import UserError
from gemmpipe.core.events import Events
from gemmpipe.core.schema import SELECTIONS
from gemmpipe.family import Family
from gemmpipe.formats import Target
from gemmpipe.formats.engine_json import EngineJson, Sglang, Vllm, nearest_key
from gemmpipe.formats.engine_lint import check_coverage, engine_files, findings_of, lint, lint_file
from gemmpipe.formats.findings import ERROR, NOTE, WARNING, Finding, summary

KNOBS: Mapping[str, object] = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
GRID = (1, 4, 16, 64, 256, 1024)
DENSE = "N=1024,K=2048,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
BLANK = DENSE.replace("128,128", "128, 128")
EXPERTS = "E=8,N=1024,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
BF16 = "E=8,N=1024,device_name=NVIDIA_H200.json"
IN_VLLM = "vllm/model_executor/layers/quantization/utils/configs"
IN_SGLANG = "sglang/kernels/ops/gemm/configs"
BY_TRITON = "sglang/configs/triton_3_6_0"


def _full(**change: object) -> dict[str, object]:
    return {str(m): {**KNOBS, **change} for m in GRID}


def _findings(
    root: Path, content: object, name: str = DENSE, place: str = IN_VLLM, present: tuple[str, ...] = ()
) -> list[Finding]:
    path = root / place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return list(lint_file(path, None, present).findings)


def _one(found: list[Finding]) -> tuple[str, str, str]:
    (finding,) = found
    return finding.severity, finding.key, finding.text


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (DENSE, IN_VLLM),
        (DENSE.replace("fp8", "int8").replace("128,128", "128, 128"), IN_VLLM),
        (EXPERTS, "vllm/anywhere"),
        (BF16, "vllm"),
        (BLANK, IN_SGLANG),
        (EXPERTS.replace("128,128", "128, 128"), BY_TRITON),
        (BF16.replace(".json", ",dtype=fp8_w8a8,per_channel_quant=True.json"), BY_TRITON),
        (BF16.replace(".json", "_down.json"), BY_TRITON),
        ("N=512,K=2048,device_name=NVIDIA_L40S,dtype=fp8_w8a8_channelwise.json", IN_SGLANG),
    ],
)
def test_valid_engine_files_have_no_finding(name: str, place: str, tmp_path: Path) -> None:
    content = _full()
    if "channelwise" in name:
        content = {m: {k: v for k, v in KNOBS.items() if k != "GROUP_SIZE_M"} for m in content} | {"64": None}
    assert _findings(tmp_path, content, name, place) == []


@pytest.mark.parametrize(
    ("content", "key", "text"),
    [
        ("{", "", "1:2: no JSON"),
        ("[]", "", "a JSON list, expected an object"),
        ('{"1": {}, "1": {}}', "", "duplicate name '1'"),
        ("{}", "", "no entry"),
        (_full() | {"64": 3}, "64", "3, not an object of knobs"),
        (_full() | {"64": None}, "64", "None, not an object of knobs"),
        (_full() | {"default": KNOBS}, "'default'", "not a whole number: the engine's int(key) fails"),
        (_full() | {"triton_version": "3.6.0"}, "'triton_version'", "not a whole number"),
        (_full() | {"0": KNOBS}, "'0'", "not a valid number of rows"),
        (_full() | {"-4": KNOBS}, "'-4'", "not a valid number of rows"),
        (_full() | {"064": KNOBS}, "'064'", "the same M as '64': the engine keeps only the later entry"),
        (_full() | {"64": KNOBS | {"NUM_KSPLIT": 1}}, "64", "vllm passes all knobs to its kernel, which has no"),
        (_full() | {"64": KNOBS | {"kpack": 1}}, "64", "kpack is an option for AMD"),
        (_full() | {"64": {"BLOCK_SIZE_M": 16} | dict(list(KNOBS.items())[1:3])}, "64", "GROUP_SIZE_M is missing"),
        (_full() | {"64": KNOBS | {"GROUP_SIZE_M": None}}, "64", "GROUP_SIZE_M is null"),
        (_full() | {"64": KNOBS | {"BLOCK_SIZE_M": 48}}, "64", "BLOCK_SIZE_M: 48 is not a power of two"),
        (_full() | {"64": KNOBS | {"num_warps": 64}}, "64", "num_warps: 64 is out of range"),
        (_full() | {"64": KNOBS | {"BLOCK_SIZE_N": True}}, "64", "BLOCK_SIZE_N: True"),
        (_full() | {"64": KNOBS | {"BLOCK_SIZE_K": 16}}, "64", "BLOCK_SIZE_K: 16 is below the minimum"),
        (_full() | {"64": KNOBS | {"BLOCK_SIZE_K": 256}}, "64", "BLOCK_SIZE_K 256 does not fit into a group of 128"),
    ],
)
def test_what_makes_vllm_fail_or_compute_wrongly(content: object, key: str, text: str, tmp_path: Path) -> None:
    severity, where, message = _one(_findings(tmp_path, content))
    assert (severity, where) == (ERROR, key)
    assert message.startswith(text)


def test_null_is_triton_s_own_default(tmp_path: Path) -> None:
    assert _findings(tmp_path, _full(num_warps=None, num_stages=None)) == []


def test_a_key_that_is_read_as_another_number(tmp_path: Path) -> None:
    content = _full()
    content["064"] = content.pop("64")
    assert _one(_findings(tmp_path, content)) == (WARNING, "'064'", "read as 64")


@pytest.mark.parametrize(
    ("name", "place", "text"),
    [
        (BLANK, IN_VLLM, "vllm does not look for this name"),
        (DENSE, IN_SGLANG, "sglang does not look for this name"),
        (DENSE.replace("fp8", "int8"), IN_VLLM, "vllm does not look for this name"),
        (DENSE.replace("NVIDIA_H200", "NVIDIA H200"), IN_VLLM, "vllm does not look for this name"),
        (DENSE.replace("NVIDIA_H200", ""), IN_VLLM, "no device name"),
        (DENSE.replace(",dtype=fp8_w8a8", ""), IN_VLLM, "no dtype: vllm looks for fp8_w8a8 or int8_w8a8"),
        (DENSE.replace(",block_shape=[128,128]", ""), IN_VLLM, "no block_shape, which vllm looks for"),
        ("N=1024,K=2048,x.json", IN_VLLM, "vllm does not look for such a name"),
        (EXPERTS.replace("H200", "H200_NVL"), "vllm", "vllm does not look for this name"),
        (EXPERTS.replace("fp8_w8a8", "bf16"), "vllm", "vllm does not look for experts of dtype=bf16"),
        (BF16.replace(".json", "_down.json"), "vllm", "a name of SGLang's"),
        (BF16, "sglang", "SGLang reads experts' files only from configs/triton_X_Y_Z"),
        (BF16, "sglang/configs/triton_3_6_0+git", "SGLang reads experts' files only from configs/triton_X_Y_Z"),
    ],
)
def test_names_and_folders_that_the_engine_does_not_read(name: str, place: str, text: str, tmp_path: Path) -> None:
    severity, _, message = _one(_findings(tmp_path, _full(), name, place))
    assert severity == ERROR
    assert message.startswith(text)


def test_the_expected_name_is_reported(tmp_path: Path) -> None:
    (finding,) = _findings(tmp_path, _full(), EXPERTS.replace("H200", "H200_NVL"), "vllm")
    assert finding.remedy == f"rename it to '{EXPERTS}'"


@pytest.mark.parametrize(
    ("name", "place", "present", "severity"),
    [
        (DENSE, IN_VLLM, "NVIDIA H200", None),
        (DENSE, IN_VLLM, "NVIDIA H100 80GB HBM3", None),
        (DENSE.replace("NVIDIA_H200", "H200"), IN_VLLM, "NVIDIA H200", ERROR),
        (DENSE, IN_VLLM, "NVIDIA H200 NVL", WARNING),
        (EXPERTS, "vllm", "NVIDIA H200 NVL", None),
    ],
)
def test_names_of_devices_that_are_here(
    name: str, place: str, present: str, severity: str | None, tmp_path: Path
) -> None:
    found = _findings(tmp_path, _full(), name, place, (present,))
    assert [finding.severity for finding in found] == ([severity] if severity else [])


def test_a_dense_file_outside_the_package_is_reported_once_per_folder(tmp_path: Path) -> None:
    for name in (DENSE, DENSE.replace("1024", "512")):
        _findings(tmp_path, _full(), name, "vllm")
    (finding,) = findings_of(lint([tmp_path], None))
    assert (finding.severity, finding.path) == (NOTE, tmp_path / "vllm")
    assert "VLLM_TUNED_CONFIG_FOLDER is only for experts" in finding.text


@pytest.mark.parametrize(
    ("knobs", "name", "place", "severity"),
    [
        ({"SWAP_AB": True, "SPLIT_K": 4}, BLANK, IN_SGLANG, None),
        ({"SWAP_AB": False, "SPLIT_K": 1}, BLANK, IN_SGLANG, ERROR),
        ({"SWAP_AB": True}, BLANK.replace("H200", "B200"), IN_SGLANG, ERROR),
        ({"SPLIT_K": 3}, BLANK, IN_SGLANG, ERROR),
        ({"SWAP_AB": True}, DENSE, IN_VLLM, ERROR),
        ({"USE_TMA": True}, BF16, BY_TRITON, None),
        ({"USE_TMA": 1}, BF16, BY_TRITON, ERROR),
        ({"USE_TMA": True}, BF16, "vllm", ERROR),
        ({"SPLIT_K": 1}, BF16, "vllm", None),
        ({"SPLIT_K": 2}, BF16, "vllm", WARNING),
        ({"SPLIT_K": 1}, BF16, BY_TRITON, ERROR),
        ({"BLOCK_SIZE_K": 256}, EXPERTS, "vllm", WARNING),
        ({"BLOCK_SIZE_K": 256}, EXPERTS.replace("128,128", "128, 128"), BY_TRITON, ERROR),
        ({"BLOCK_SIZE_K": 256}, DENSE.replace("K=2048", "K=128"), IN_VLLM, None),
        ({"BLOCK_SIZE_K": 64}, BLANK, IN_SGLANG, None),
        ({"BLOCK_SIZE_K": 64}, BLANK.replace("NVIDIA_H200", "AMD_Instinct_MI300X"), IN_SGLANG, WARNING),
        ({"BLOCK_SIZE_K": 64, "kpack": 2}, DENSE.replace("NVIDIA_H200", "AMD_Instinct_MI300X"), IN_VLLM, None),
    ],
)
def test_what_the_engines_kernels_differ_in(
    knobs: dict[str, object], name: str, place: str, severity: str | None, tmp_path: Path
) -> None:
    found = _findings(tmp_path, _full(**knobs), name, place)
    assert {finding.severity for finding in found} == ({severity} if severity else set())
    assert all(finding.key == "1, 4, 16, 64 and 2 more" for finding in found), "entries alike are one line"


def test_a_file_of_large_ms_alone(tmp_path: Path) -> None:
    content = {str(m): KNOBS for m in (2048, 3072, 4096)}
    text = "no key of at most 16: calls of 1 to 2,560 rows use the entry of M = 2048"
    assert _one(_findings(tmp_path, content)) == (WARNING, "", text)


def test_gaps_and_missing_ends(tmp_path: Path) -> None:
    found = _findings(tmp_path, {str(m): KNOBS for m in (1, 8, 32, 512)})
    assert [(finding.severity, finding.key) for finding in found] == [(WARNING, ""), (WARNING, "8"), (WARNING, "512")]
    assert found[0].text == "no key from 1024 on: larger calls use the entry of M = 512"


@given(st.lists(st.integers(17, 5000), min_size=2, max_size=6, unique=True))
def test_the_reported_calls_are_those_that_use_the_lowest_key(ms: list[int]) -> None:
    text = next(check_coverage(Path("x"), ms)).text
    last = int(text.partition("1 to ")[2].partition(" rows")[0].replace(",", ""))
    assert nearest_key(ms, last) == min(ms) != nearest_key(ms, last + 1)


def test_the_engine_is_known_from_folder_or_name_or_the_user(tmp_path: Path) -> None:
    for name, place, expected in (
        (BLANK, "x", "sglang"),
        (DENSE, "x", "vllm"),
        (BF16, "triton_3_6_0", "sglang"),
        (BF16, "sglang/vllm", "vllm"),
    ):
        _findings(tmp_path, _full(), name, place)
        assert lint_file(tmp_path / place / name, None).engine == expected
    (note,) = _findings(tmp_path, _full(), BF16, "x")
    assert (note.severity, "engine=sglang" in note.remedy) == (NOTE, True)
    assert lint_file(tmp_path / "x" / BF16, "sglang").engine == "sglang"


def test_an_engines_files_of_other_functions_are_no_findings(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "vllm"
    folder = tmp_path / "site-packages" / IN_VLLM
    folder.mkdir(parents=True)
    names = ("headdim=64,dstate=128,device_name=NVIDIA_H200,cache_dtype=float16.json", "n=64,k=128,device_name=x.json")
    for name in names:
        (folder / name).write_text("{}")
    assert {path.name for path in engine_files([tmp_path])} == set(names), "no package: a name may be misspelt"
    (package / "__init__.py").touch()
    assert [path.name for path in engine_files([tmp_path])] == [names[1]], "misspelt in its case"


def test_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nope: no such file or folder"):
        lint([tmp_path / "nope"], None)
    (tmp_path / "vllm.meta.json").write_text("{}")
    with pytest.raises(UserError, match="no file of an engine"):
        lint([tmp_path], None)
    with pytest.raises(UserError, match="engine: no engine 'vlm'; did you mean 'vllm'"):
        lint([tmp_path], "vlm")


def test_a_line_and_the_summary() -> None:
    finding = Finding(path=Path("a\n.json"), key="64", severity=ERROR, text="what", remedy="what to do")
    assert finding.line == "a?.json: 64: error: what; what to do"
    note = Finding(path=Path("b.json"), severity=NOTE, text="what", remedy="what to do")
    assert summary(2, [finding]) == "lint: 2 files: 1 error in 1 of them"
    assert summary(2, [finding, note]) == "lint: 2 files: 1 error in 1 of them, 1 note"
    assert summary(1, [finding, note]) == "lint: 1 file: 1 error, 1 note"
    assert summary(2, [note, note]) == "lint: 2 files: 2 notes"
    assert summary(1, []) == "lint: 1 file: nothing found"


@settings(max_examples=20)
@given(
    form=st.sampled_from([Vllm(device_name=None), Sglang(device_name=None)]),
    tiles=st.tuples(st.sampled_from([16, 64, 256]), st.sampled_from([32, 128]), st.sampled_from([64, 128])),
    rest=st.tuples(st.sampled_from([1, 16, 64]), st.sampled_from([4, 8]), st.sampled_from([2, 5])),
    n=st.integers(1, 2**15),
    k=st.integers(1, 2**15),
)
def test_what_our_formats_write_has_no_finding(
    form: EngineJson,
    tiles: tuple[int, int, int],
    rest: tuple[int, int, int],
    n: int,
    k: int,
    tmp_path_factory: pytest.TempPathFactory,
    h200: Device,
    blockscale: Family,
) -> None:
    folder = tmp_path_factory.mktemp("written")
    knobs = dict(zip(KNOBS, (*tiles, *rest), strict=True)) | {"NUM_KSPLIT": 1, "SWAP_AB": False}
    row = {"format": form.name, "N": n, "K": k, "libtype": "triton", "gfx": "sm_90", "cu_num": 132, "weight": 1.0}
    rows = [{**row, "bucket": str(m), "bucket_low": m - 1, "config": json.dumps(knobs)} for m in GRID]
    frame = pd.DataFrame(rows, columns=[*SELECTIONS, "M", "N", "K"])
    target = Target(folder=folder, device=h200, run_id="r", provenance={}, events=Events(listeners=[]))
    (path,) = form.write(blockscale, frame, target)
    assert {finding.severity for finding in lint_file(path, None).findings} <= {NOTE}
