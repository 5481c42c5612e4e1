"""The time left that `compare` states of experts on an H200 (2026-11-26), whose first launches import and compile vLLM.

A record has the ends of the problems in the finals, and of vLLM's files the configurations that the run used.
"""

import importlib
import json
import lzma
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_run import BENCH, H200
from stage_contexts import stage_context

from gemmpipe.backends.engine_function import SglangFunction, VllmFunction
from gemmpipe.backends.engine_pair import VllmPair
from gemmpipe.core.data import Candidate, Problem
from gemmpipe.core.device import cpu_device
from gemmpipe.core.events import Event
from gemmpipe.family import Family, KernelDefaults, load_family
from gemmpipe.report.progress import RunProgress
from gemmpipe.sources.inline import InlineShapes
from gemmpipe.stages import Context
from gemmpipe.stages.finals_work import FinalsWork
from gemmpipe.stages.first_launches import FirstLaunchPace, first_launches

RECORDS = [
    json.loads(line)
    for line in lzma.decompress((Path(__file__).parents[1] / "data" / "h200_compare_experts.jsonl.xz").read_bytes())
    .decode()
    .splitlines()
]
FAMILY = load_family("fmoe")
VLLM = Candidate.of("vllm_function", {})
IMPLEMENTATIONS = (VllmFunction(), SglangFunction(), VllmPair())
CONFIGS = Path("vllm", "model_executor", "layers", "fused_moe", "configs")
CONFIGURATION = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4}
LARGE = {**CONFIGURATION, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256}


@pytest.fixture
def vllm_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of files of a package `vllm` that cannot be imported: files are found without."""
    configs = tmp_path / "site" / CONFIGS
    configs.mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text("raise AssertionError('imported')\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    yield configs
    assert "vllm" not in sys.modules


def _write(configs: Path, files: Mapping[str, Any]) -> None:
    for name, configurations in files.items():
        (configs / name).write_text(json.dumps(configurations))


def _context(folder: Path, no_words: KernelDefaults, family: Family = FAMILY, **given: Any) -> Context:
    return stage_context(folder, family, no_words, given.pop("device", H200), implementations=IMPLEMENTATIONS, **given)


def _replay(
    record: Mapping[str, Any], context: Context, *, cached: bool = False
) -> Iterator[tuple[float, RunProgress]]:
    """(seconds, what is stated then), twice a second of the finals; `cached`: a run before has compiled the kernels."""
    problems = [FAMILY.problem(tuple({**p["key"], **record["common"]}.items())) for p in record["problems"]]
    candidates = {
        problem.id: [VLLM, *(Candidate.of("own", {"place": i}) for i in range(1, row["entries"]))]
        for problem, row in zip(problems, record["problems"], strict=True)
    }
    rows: Any = {
        name: [{"candidate": c.id, "us": None, "role": "compared"} for c in these] for name, these in candidates.items()
    }
    launches = first_launches({p: candidates[p.id] for p in problems}, context)
    costs = {p.id: BENCH.cost(p, context, all_rounds=True) for p in problems}
    work = FinalsWork(rows, candidates, costs, first_s={key: launch.seconds for key, launch in launches.items()})
    begins, before, done = record["bench"], record["bench"], dict[str, float]()
    for problem, row in zip(problems, record["problems"], strict=True):
        cost, launch = costs[problem.id], launches[problem.id, VLLM.id]
        took_s, before = row["done"] - before, row["done"]
        if cached and launch.seconds:  # the time of a worker's import, and a usual one of other finals
            other_s = cost.setup_s + row["entries"] * cost.entry_s(None)
            took_s = min(took_s, 15.0 * (launch.import_s > 0) + 1.2 * other_s)
        done[problem.id] = max(done.values(), default=begins) + took_s
    ends = max(done.values())
    progress, usual_s = RunProgress(0.0), len(problems) * BENCH.usual_s(H200)
    progress.take(Event(kind="step", text="lineup", done=2, total=4, rest_s=usual_s), record["lineup"])
    rest_s = work.total_s - usual_s
    progress.take(Event(kind="stage", text="lineup", total=1, unit="compilations", rest_s=rest_s), record["lineup"])
    progress.take(Event(kind="step", text="bench", done=3, total=4), begins)
    stage = Event(kind="stage", text="bench", total=len(problems), unit="problems", expected_s=work.total_s)
    progress.take(stage, begins)
    pace = FirstLaunchPace(launches, work, candidates, 1, begins)
    for half in range(1, int(2 * (ends - begins))):
        now = begins + half / 2
        pending = {name: these for name, these in candidates.items() if done[name] > now}
        stage_s, range_s = pace.measure(pending, now)
        share, count = work.share(pending), len(done) - len(pending)
        event = Event(kind="progress", done=count, share=share, stage_s=stage_s, left_range_s=range_s)
        progress.take(event, now)
        yield now, progress


def _errors(
    moments: Iterator[tuple[float, RunProgress]], begins: float, end: float
) -> tuple[list[float], list[tuple[float, float, float]]]:
    """From `begins` on: errors where one number is stated, and (least, true, most) where both ends are."""
    errors, between = [], []
    for now, progress in moments:
        left_s, range_s, true_s = progress.left_s(now), progress.range_s(now), end - now
        if now > begins and true_s > 5:
            assert left_s is not None, now
            if range_s is None:
                errors.append(abs(left_s - true_s) / true_s)
            else:
                between.append((range_s[0], true_s, range_s[1]))
    return errors, between


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_from_a_quarter_on_the_time_left_is_known(
    record: Mapping[str, Any], tmp_path: Path, vllm_files: Path, no_words: KernelDefaults
) -> None:
    """18 s were stated of 90, and 40 of 70: 94 of 112 s were checks, most of them vLLM's import and its kernels."""
    _write(vllm_files, record["files"])
    moments = _replay(record, _context(tmp_path, no_words))
    errors, between = _errors(moments, record["end"] / 4, record["end"])
    assert len(errors) + len(between) > 70
    assert len(errors) > 30, "both ends until the first kernels are compiled"
    assert sum(error <= 0.3 for error in errors) > 0.9 * len(errors)
    assert max(errors) < 0.45
    assert all(least <= true_s <= most for least, true_s, most in between)


def test_kernels_of_a_run_before_are_not_waited_for(tmp_path: Path, vllm_files: Path, no_words: KernelDefaults) -> None:
    """The recorded run without the time of its kernels: both ends are stated until three problems are done."""
    record = RECORDS[0]
    _write(vllm_files, record["files"])
    end = max(now for now, _ in _replay(record, _context(tmp_path, no_words), cached=True)) + 0.5
    errors, between = _errors(_replay(record, _context(tmp_path / "again", no_words), cached=True), end / 4, end)
    assert all(least <= true_s <= most for least, true_s, most in between)
    assert len(between) > 20
    assert len(errors) > 5
    assert sum(error <= 0.35 for error in errors) > 0.8 * len(errors)


def _experts(ms: list[int], dtype: str | None = None, **sizes: int) -> list[Problem]:
    words = KernelDefaults(dtype=dtype, out_dtype=None, bias=None)
    key = {"model_dim": 2048, "inter_dim": 768, "expert": 128, "topk": 8, **sizes}
    return InlineShapes(items=[{"token": ms, **key}]).problems(FAMILY, words, H200.gfx)


def _seconds(problems: list[Problem], context: Context) -> list[float]:
    found = first_launches({p: [VLLM, VLLM] for p in problems}, context)
    return [found[p.id, VLLM.id].seconds for p in problems]


def test_a_configuration_of_experts_compiles_once(tmp_path: Path, vllm_files: Path, no_words: KernelDefaults) -> None:
    """Also for another product; the first launch imports the engine, and a large tile takes longer to compile."""
    name = "E=128,N={},device_name=NVIDIA_H200.json"
    files = {name.format(768): {"16": CONFIGURATION, "1024": LARGE}, name.format(192): {"16": CONFIGURATION}}
    _write(vllm_files, files)
    problems = [*_experts([16, 20, 1024, 2000]), *_experts([16], inter_dim=192)]
    first, same, large, largest, other = _seconds(problems, _context(tmp_path, no_words))
    assert (same, largest, other) == (0, 0, 0)
    assert first > large > 3, "the import"
    _write(vllm_files, {name.format(768): {"16": CONFIGURATION, "1024": {**LARGE, "BLOCK_SIZE_M": 16}}})
    assert 2 < _seconds(problems, _context(tmp_path / "small", no_words))[2] < large


@pytest.mark.parametrize("content", [None, "{", '{"16": {"BLOCK_SIZE_M": 16}}'], ids=["none", "cut off", "incomplete"])
def test_without_a_file_that_can_be_read_small_ms_compile(
    content: str | None, tmp_path: Path, vllm_files: Path, no_words: KernelDefaults
) -> None:
    if content is not None:
        (vllm_files / "E=128,N=768,device_name=NVIDIA_H200.json").write_text(content)
    context = _context(tmp_path, no_words)
    first, second, third, large, largest = _seconds(_experts([1, 4, 256, 1024, 4096]), context)
    assert first > second == third > 2
    assert (large, largest) == (0, 0)


def test_scales_along_another_k_need_another_kernel_of_the_first_product(
    tmp_path: Path, vllm_files: Path, no_words: KernelDefaults
) -> None:
    problems = [p for k in (2048, 7168, 4096) for p in _experts([16], "float8_e4m3fn", model_dim=k)]
    first, other, same = _seconds(problems, _context(tmp_path, no_words, assignments={"one": 0}))
    assert (other, same) == (pytest.approx(first / 2), 0)


def test_each_worker_imports_the_engine_once(tmp_path: Path, vllm_files: Path, no_words: KernelDefaults) -> None:
    """Not again for a later batch, and not for an engine's products that only load a library."""
    family = load_family("linear_fp8_blockscale")
    problems = InlineShapes(items=[[m, 256, 512] for m in (1, 16, 64)]).problems(family, no_words, H200.gfx)
    own, triton, cutlass = (
        Candidate.of("own", {}),
        *(Candidate.of("vllm", {"product": name}) for name in ("triton", "cutlass")),
    )
    entries = {p: [own, cutlass, triton] for p in problems}

    def sums(folder: str, **given: Any) -> list[float]:
        found = first_launches(entries, _context(tmp_path / folder, no_words, family, **given))
        return [sum(launch.seconds for (name, _), launch in found.items() if name == p.id) for p in problems]

    assert [s > 10 for s in sums("one")] == [True, False, False]
    two = type("Pool", (), {"devices": (H200, replace(H200, index=1))})()
    assert [s > 10 for s in sums("two", pool_or_none=two)] == [True, True, False]
    assert sums("later", assignments={"one": 0}) == [0, 0, 0]
    entries = {p: [own, cutlass] for p in problems}
    assert sums("library") == [0, 0, 0]
    entries = {p: [triton] for p in problems}
    assert sums("cpu", device=cpu_device()) == [0, 0, 0]
