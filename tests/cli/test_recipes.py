"""Recipes: their overrides, and the refusal of invalid and malicious ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString

from gemmpipe.cli.main import main
from gemmpipe.cli.recipes import read_recipe
from gemmpipe.pipeline.plan import Plan

Refusal = Callable[..., str]
GROUPS = frozenset({"kernel", "shapes", "space", "format", "stage", "search"})


def _write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_recipe_equals_its_command_line(plans: list[Plan], folder: Path) -> None:
    text = """
version: 1
pipeline: quick
kernel: a16w16
shapes: qwen8b
shapes.nsets: [1, 64]
space: {num_stages: [3, 4]}
stages: {screen: {keep: 8}}
backend: [triton]
format.triton_json.buckets: {small: 256, large: null}
output: "o (x), y=1"
"""
    assert main([str(_write(folder, text, "mine/tune.yaml")), "shapes.tp=2"]) == 0
    typed = [
        "quick",
        "kernel=a16w16",
        "shapes=qwen8b",
        "shapes.nsets=[1,64]",
        "space.num_stages=[3,4]",
        "stages.screen.keep=8",
        "backend=[triton]",
        "format.triton_json.buckets={small:256,large:null}",
        "output=o (x), y=1",
        "shapes.tp=2",
    ]
    assert main(typed) == 0
    from_recipe, from_line = plans
    assert from_recipe.config == from_line.config
    assert from_recipe.space == from_line.space
    assert from_recipe.pipeline == from_line.pipeline == "quick"


@pytest.mark.parametrize("name", ["tune.yaml", "a=b,c.yaml", "kernel/x y.yml", "pipeline(1).yaml"])
def test_any_file_name(plans: list[Plan], folder: Path, name: str) -> None:
    path = _write(folder, "version: 1\nkernel: a16w16\n", name)
    assert main([str(path)]) == 0
    assert plans[0].family.name == "a16w16"
    assert plans[0].pipeline == "tune"


def test_overrides_win_over_a_recipe(plans: list[Plan], folder: Path) -> None:
    path = _write(folder, "version: 1\nkernel: a16w16\nshapes.tp: 8\n")
    assert main([str(path), "kernel=a8w8_blockscale", "shapes.tp=1"]) == 0
    assert plans[0].family.name == "a8w8_blockscale"
    assert plans[0].source.tp == 1  # type: ignore[attr-defined]


def test_sweep(plans: list[Plan], folder: Path) -> None:
    path = _write(folder, "version: 1\nsweep:\n  kernel: [a16w16, a8w8_blockscale]\n  shapes.tp: [1, 2]\n")
    assert main([str(path)]) == 0
    assert [(plan.family.name, plan.source.tp) for plan in plans] == [  # type: ignore[attr-defined]
        ("a16w16", 1),
        ("a16w16", 2),
        ("a8w8_blockscale", 1),
        ("a8w8_blockscale", 2),
    ]
    plans.clear()
    assert main([str(path), "kernel=a16w16"]) == 0
    assert [plan.family.name for plan in plans] == ["a16w16", "a16w16"]


def test_values_are_literal(folder: Path) -> None:
    values = {"a": "choice(1,2)", "b": "null", "c": "1", "d": "x,y", "e": '"', "f": "\\", "g": "glob(*)", "h": "[1]"}
    text = "version: 1\n" + "".join(f"output.{key}: {value!r}\n".replace("\\\\", "\\") for key, value in values.items())
    for override in read_recipe(_write(folder, text), GROUPS).overrides:
        parsed = OverridesParser.create().parse_override(override)
        assert not parsed.is_sweep_override()
        value = parsed.value()
        assert isinstance(value, QuotedString | str)
        assert getattr(value, "text", value) == values[parsed.key_or_group.removeprefix("output.")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kernel: a16w16\n", "version is missing; expected 'version: 1'"),
        ("version: 2\n", "version is 2; expected"),
        ("version: true\n", "version is True; expected"),
        ("version: 1\npipeline: [tune]\n", "pipeline is ['tune']; expected a name"),
        ("version: 1\npipeline: tun\n", "no such pipeline"),
        ("version: 1\nkernel: a16w1\n", "kernel: no option 'a16w1'; did you mean 'a16w16'?"),
        ("version: 1\nstagse: {screen: {keep: 3}}\n", "stagse: no such key; did you mean 'stages'?"),
        ("version: 1\nstages: {screen: {kep: 3}}\n", "stages.screen.kep: no such key; did you mean 'keep'?"),
        ("version: 1\nstages.screen.keep: abc\n", "'abc' given, expected a whole number"),
        ("version: 1\nhydra.callbacks.x._target_: pandas.read_pickle\n", "not allowed in a recipe"),
        ("version: 1\nhydra: {run: {dir: /elsewhere}}\n", "hydra's own settings"),
        ("version: 1\nhydra/launcher: joblib\n", "hydra's own settings"),
        ("version: 1\nsearch@hydra.callbacks: halving\n", "hydra's own settings"),
        ("version: 1\nsearch@_global_: halving\n", "not allowed in a recipe"),
        ("version: 1\n+hydra.job.env_set.A: b\n", "expected a key as on the command line"),
        ("version: 1\n~kernel: x\n", "expected a key as on the command line"),
        ("version: 1\nsearch: {_target_: builtins.open}\n", "not allowed in a recipe"),
        ("version: 1\nsearch._target_: os.system\n", "not allowed in a recipe"),
        ("version: 1\nstages: {screen: [{_target_: os.system}]}\n", "not allowed in a recipe"),
        ("version: 1\nkernel.family: antigravity\n", "no family 'antigravity'"),
        ("version: 1\noutput: ${oc.env:SECRET}\n", "interpolations are not allowed"),
        ("version: 1\noutput: 'a${x}'\n", "interpolations are not allowed"),
        ("version: 1\nsweep: {output: ['${x}']}\n", "interpolations are not allowed"),
        ("version: 1\na: &a [1]\nb: *a\n", "line 3: aliases are not allowed"),
        ("version: 1\nbatch: 1\nbatch: 2\n", "duplicate key 'batch'"),
        ("version: 1\noutput: !!python/object/apply:os.system ['x']\n", "line 2"),
        ("version: 1\nbatch: 2026-01-01\n", "is a date"),
        ("version: 1\nbatch: [\n", "line 3"),
        ("- 1\n", "expected keys and values"),
        ("", "expected keys and values"),
        ("version: 1\n1: 2\n", "key 1; expected"),
        ("version: 1\nsweep: [kernel]\n", "sweep is ['kernel']; expected keys"),
        ("version: 1\nsweep: {kernel: a16w16}\n", "sweep.kernel is 'a16w16'; expected a list"),
    ],
)
def test_an_error_in_a_recipe_is_one_line(
    refusal: Refusal, plans: list[Plan], folder: Path, text: str, message: str
) -> None:
    path = _write(folder, text)
    line = refusal(str(path))
    assert message in line
    assert plans == []


def test_an_alias_bomb_is_refused_at_once(refusal: Refusal, folder: Path) -> None:
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 9))
    assert "aliases are not allowed" in refusal(str(_write(folder, f"version: 1\nl0: &l0 [x]\n{levels}")))
    assert "larger than" in refusal(str(_write(folder, "#" * 1_000_001)))


def test_deep_nesting_is_refused(refusal: Refusal, folder: Path) -> None:
    assert "r.yaml" in refusal(str(_write(folder, "version: 1\nbatch: " + "[" * 5000)))


def test_an_error_of_a_recipe_names_its_file(refusal: Refusal, folder: Path) -> None:
    path = _write(folder, "version: 1\nkernl: a16w16\n")
    assert refusal(str(path)) == f"{path}: kernl: no such key; did you mean 'kernel'?"
