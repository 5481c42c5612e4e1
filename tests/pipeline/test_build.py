"""Every shipped option and pipeline builds, and the defaults are those the README promises."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import yaml
from pairwise import few

from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.main import main
from gemmpipe.core.data import Device
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import shipped
from gemmpipe.pipeline.config_types import construct, convert
from gemmpipe.pipeline.plan import Plan

OPTIONS = ConfigFolders(config_dir=None).options
PIPELINES = ConfigFolders(config_dir=None).pipelines
LISTS = ("backend", "format", "roofline")
NSETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)


@pytest.mark.parametrize("group", ["search", "stage", "timer", "executor", "device", "roofline"])
def test_every_key_of_an_option_is_explained(group: str) -> None:
    plain = {"_target_", "defaults", "kind", "rungs", "h100", "h200"}
    plain |= {"cublaslt", "hipblaslt", "torch"}  # of `prefer`, which is explained
    explained: dict[str, bool] = {}
    for path in Path("conf", group).glob("*.yaml"):
        for key, rest in re.findall(r"^ *(\w+):(.*)$", path.read_text(), re.MULTILINE):
            explained[key] = explained.get(key, False) or "#" in rest or key in plain
    assert [key for key, text in explained.items() if not text] == []


def _override(group: str, name: str) -> str:
    """The override that selects an option in its place."""
    if group == "timer":
        return f"timer@stages.bench.timer={name}"
    return f"{group}=[{name}]" if group in LISTS else f"{group}={name}"


def _lines() -> list[list[str]]:
    """Command lines that together select every option: the first of every group, the second, and so on.

    Composing a line takes half a second.
    """
    groups = [[_override(group, name) for name in names] for group, names in OPTIONS.items() if group != "stage"]
    return [[override for override in line if override] for line in itertools.zip_longest(*groups)]


@pytest.mark.parametrize("line", few(_lines(), *range(16)), ids=" ".join)  # the others repeat models and spaces
def test_every_option_builds(plans: list[Plan], line: list[str]) -> None:
    files = {f"shapes={name}" for name in ("csv", "trace", "log", "tunableop")}
    assert main([*line, *(["shapes.path=x"] if files & set(line) else [])]) == 0
    assert len(plans) == 1


def _pipeline(stage: str) -> str:
    """The pipeline with the stage."""
    pipelines = {
        "load": "merge",
        "verify_report": "verify",
        "verify_calls": "verify",
        "lineup": "compare",
        "lint_timings": "lint",
    }
    pipeline = pipelines.get(stage, stage)
    return pipeline if pipeline in PIPELINES else "tune"


def _pipelines() -> list[list[str]]:
    """Command lines that together select every pipeline, and every option of a stage in a pipeline that has it."""
    options: dict[str, dict[str, list[str]]] = {name: {} for name in sorted(PIPELINES)}
    for name in OPTIONS["stage"]:
        stage = name if name.startswith(("verify", "lint")) else name.split("_")[0]
        options[_pipeline(stage)].setdefault(stage, []).append(f"stage@stages.{stage}={name}")
    return [
        [pipeline, *filter(None, together)]
        for pipeline, stages in options.items()
        for together in (*itertools.zip_longest(*stages.values()), *([()] if not stages else []))
    ]


@pytest.mark.parametrize("line", _pipelines(), ids=" ".join)
def test_every_pipeline_and_stage_builds(
    plans: list[Plan], capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    assert main(line) == 0
    assert line == ["doctor"] or [plan.pipeline for plan in plans] == line[:1]


def test_every_file_has_a_title() -> None:
    for path in [*shipped("conf").rglob("*.yaml"), *shipped("pipelines").rglob("*.yaml")]:
        assert path.read_text().startswith("# "), path
        assert yaml.safe_load(path.read_text()), path


def test_pipelines_hold_no_tuning_value() -> None:
    for path in shipped("pipelines").glob("[!_]*.yaml"):
        assert set(yaml.safe_load(path.read_text())) <= {"defaults", "chain", "hydra"}, path


def test_the_defaults_of_the_readme(plans: list[Plan]) -> None:
    assert main(["kernel=a8w8_blockscale"]) == 0
    config = plans[0].config
    stages = plans[0].stages
    screen, bench, select = (stages[name] for name in ("screen", "bench", "select"))
    expected: dict[object, object] = {
        (screen.timer.warmup, screen.timer.iters, screen.keep): (5, 2, 20),  # type: ignore[attr-defined]
        (bench.timer.warmup, bench.timer.iters, bench.err_ratio): (5, 101, 0.05),  # type: ignore[attr-defined]
        (select.min_improvement_pct, select.max_extra_weight_pct): (1, 0),  # type: ignore[attr-defined]
    }
    for found, wanted in expected.items():
        assert found == wanted
    assert select.prefer == dict.fromkeys(("cublaslt", "hipblaslt", "torch"), 0.995)  # type: ignore[attr-defined]
    plain = ("version", "output", "profile", "batch", "retune", "verbose", "resume", "reuse")
    assert [config[key] for key in plain] == [1, "outputs/tuned", None, 100, False, False, None, None]
    assert list(plans[0].formats) == ["csv", "triton_json"]
    own = ["triton", "gluon", "skinny", "sliced", "streamed", "fused", "fused_sliced", "fused_streamed", "weight_only"]
    assert list(plans[0].backends) == [*own, "torch", "scaled_mm", "quantised_library", "onednn"]
    assert plans[0].executor.timeout_s == 60  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "tp"), [("llama8b", 1), ("llama70b", 8), ("llama405b", 8), ("qwen8b", 1), ("qwen32b", 1)]
)
def test_models(plans: list[Plan], name: str, tp: int) -> None:
    assert main([f"shapes={name}"]) == 0
    source = plans[0].source
    assert source.tp == tp  # type: ignore[attr-defined]
    assert tuple(source.nsets) == NSETS  # type: ignore[attr-defined]
    problems = source.problems(plans[0].family, plans[0].defaults, "sm_90")
    assert len(problems) == 4 * len(NSETS)


def test_llama70b_is_cut_as_engines_cut_it(plans: list[Plan]) -> None:
    assert main(["shapes=llama70b", "shapes.nsets=1"]) == 0
    problems = plans[0].source.problems(plans[0].family, plans[0].defaults, "sm_90")
    assert [(p["N"], p["K"]) for p in problems] == [(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)]


def test_shapes_of_aiters_script(plans: list[Plan]) -> None:
    assert main(["shapes=a8w8_blockscale_aiter"]) == 0
    problems = plans[0].source.problems(plans[0].family, plans[0].defaults, "gfx942")
    assert sorted((p["M"], p["N"], p["K"]) for p in problems) == sorted(
        (m, n, k)
        for m in (256, 2048, 4096)
        for n, k in ((1024, 1024), (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
    )


def _counts(plan: Plan, device: Device, m: int) -> tuple[int, int, int]:
    """Configurations of the space, distinct ones once normalised, and those of them that fit."""
    from gemmpipe.core.data import Candidate

    family = plan.family
    values = {"M": m, "N": 7168, "K": 8192}
    from gemmpipe.family.problem import make_problem

    problem = make_problem(family, values, plan.defaults, device.gfx, "test")
    spec = family.spec(problem)
    (triton,) = plan.backends["triton"].implementations(family)
    points = list(triton.configs(spec, device, plan.space))
    different = {Candidate.of("triton", triton.normalise(spec, knobs, device)) for knobs in points}
    return len(points), len(different), sum(triton.unsupported_reason(spec, c.knobs, device) is None for c in different)


def test_aiters_space_has_its_points_and_collapses_on_nvidia(plans: list[Plan], h200: Device) -> None:
    from gemmpipe.core.device import arch_device

    assert main(["space=a8w8_blockscale_aiter"]) == 0
    assert _counts(plans[0], arch_device("gfx942"), 4096)[:2] == (5832, 5832)
    assert _counts(plans[0], h200, 4096)[:2] == (1944, 1944)


def test_the_default_space_is_large_enough(plans: list[Plan], h200: Device) -> None:
    assert main(["kernel=a8w8_blockscale"]) == 0
    for m, fewest in ((1, 800), (16, 800), (64, 800), (96, 400), (256, 400), (4096, 400)):
        assert _counts(plans[0], h200, m)[2] >= fewest, m


def _refuse(node: Mapping[str, object], expected: type, where: str) -> object:
    raise AssertionError(where)


@pytest.mark.parametrize(
    ("value", "hint", "result"),
    [
        (1, int, 1),
        (1, float, 1.0),
        (None, int | None, None),
        ([1, 2], tuple[int, ...], (1, 2)),
        (1, tuple[int, ...], (1,)),
        (1, int | tuple[int, ...], 1),
        ("a", Literal["a", "b"], "a"),
        ({"a": [1]}, Mapping[str, tuple[int, ...]], {"a": (1,)}),
        ([[1, {"M": [1]}]], tuple[object, ...], ((1, {"M": (1,)}),)),
        ("~", Path, Path.home()),
        ([1, "x"], tuple[int, str], (1, "x")),
    ],
)
def test_values_of_a_type_are_taken(value: object, hint: object, result: object) -> None:
    assert convert(value, hint, "k", _refuse) == result


@pytest.mark.parametrize(
    ("value", "hint", "text"),
    [
        (True, int, "k: true given, expected a whole number"),
        (1.0, int, "k: 1.0 given, expected a whole number"),
        ("1", int, "k: '1' given, expected a whole number"),
        (True, float, "k: true given, expected a number"),
        (float("inf"), float, "k: inf given, expected a number"),
        (1, bool, "k: 1 given, expected true or false"),
        (1, str, "k: 1 given, expected text; in quotes: '\"1\"'"),
        (None, str, "k: null given, expected text"),
        ("", Path, "k: '' given, expected a path"),
        ("c", Literal["aa", "bb"], "k: 'c' given, expected one of aa, bb"),
        ([1], tuple[int, int], "k: [1] given, expected [a whole number, a whole number]"),
        ({"a": "x"}, Mapping[str, int], "k.a: 'x' given, expected a whole number"),
    ],
)
def test_values_of_another_type_are_refused(value: object, hint: object, text: str) -> None:
    with pytest.raises(UserError) as error:
        convert(value, hint, "k", _refuse)
    assert str(error.value) == text


@dataclass(frozen=True, kw_only=True)
class _Pair:
    first: int
    second: str | None


def test_fields_are_checked_by_name() -> None:
    assert construct(_Pair, {"first": 1, "second": None}, "k", _refuse) == _Pair(first=1, second=None)
    with pytest.raises(UserError, match=r"k\.frist: no such key; did you mean 'first'\?"):
        construct(_Pair, {"frist": 1}, "k", _refuse)
    with pytest.raises(UserError, match=r"k\.second: missing, expected text or null"):
        construct(_Pair, {"first": 1}, "k", _refuse)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("kernel.dtype=fp9", "kernel.dtype: 'fp9', expected a dtype such as bfloat16; did you mean 'fp8'?"),
        ("stages.screen.keep=0", "stages.screen.keep: 0 given, expected at least 1"),
        ("executor.workers=0", "executor.workers: 0 given, expected at least 1"),
        ("executor.memory_pct=0", "executor.memory_pct: 0 given, expected at least 1"),
        ("stages.bench.err_ratio=-1", "stages.bench.err_ratio: -1 given, expected above 0 and at most 1"),
        ("stages.bench.timer.iters=0", "stages.bench.timer.iters: 0 given, expected at least 1"),
        ("stages.select.tie_pct=-5", "stages.select.tie_pct: -5 given, expected at least 0"),
        ("search.trial_fraction=2", "search.trial_fraction: 2 given, expected above 0 and at most 1"),
        ("search.rungs.keep_fraction=1", "search.rungs.keep_fraction: 1 given, expected between 0 and 1"),
    ],
)
def test_values_out_of_range_are_refused(
    override: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([override]) == 2
    assert capsys.readouterr().err == f"gemmpipe: {text}\n"
