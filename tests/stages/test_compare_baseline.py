"""The baseline of a comparison: its names, the check before anything is timed, and comparisons without a time."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from gemmpipe.backends.aten import Torch
from gemmpipe.cli.main import main
from gemmpipe.core.data import Device
from gemmpipe.core.errors import UserError
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.stages.compare.baseline import check_entries, check_label, full_name, unknown_line

LINEAR = ("kernel=linear_fp8_row", "shapes=list", "shapes.items=[{M: [4, 32], N: 128, K: 256}]", "device=cpu")
NAMES = {"tuned", "torch mm", "torch float32_copy", "deepgemm"}


@pytest.fixture
def context(h200: Device) -> Any:
    """The parts of a Context that the check of names needs: two problems, and one backend."""
    family = load_family("a16w16")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    problems = [make_problem(family, {"M": m, "N": 64, "K": 128}, defaults, h200.gfx, "case") for m in (4, 8)]
    return SimpleNamespace(
        family=family,
        device=h200,
        implementations=(Torch(),),
        implementation={"torch": Torch()}.get,
        problems=problems,
        space=None,
    )


@pytest.mark.parametrize("name", ["torch mm", "torch", "deepgemm", "fastest library", "fastest peer", "own kernels"])
def test_a_name_of_an_entry_or_of_its_backend_is_known(context: Any, name: str) -> None:
    """Timed or not."""
    check_entries(name, context, NAMES, {problem.id for problem in context.problems})


def test_a_misspelt_name_is_an_error_with_the_nearest_entry(context: Any) -> None:
    every = {problem.id for problem in context.problems}
    with pytest.raises(UserError, match="no entry named 'torch flaot32_copy'; did you mean 'torch float32_copy'"):
        check_entries("torch flaot32_copy", context, NAMES, every)


def test_entries_of_other_batches_are_known_too(context: Any) -> None:
    """The first batch has a part of the names; libraries list their candidates for the problems of later ones."""
    first = {context.problems[0].id}
    check_entries("torch bfloat16_convert", context, {"torch mm"}, first)
    with pytest.raises(UserError, match="did you mean 'torch bfloat16_convert'"):
        check_entries("torch bfloat16_konvert", context, {"torch mm"}, first)


def test_a_label_is_checked_before_the_problems_are_known() -> None:
    check_label("torch anything", {"torch"})
    check_label("torch, its fastest", {"torch"})
    with pytest.raises(UserError, match="no entry named 'torhc float32_copy'; did you mean 'torch'"):
        check_label("torhc float32_copy", {"torch", "onednn"})


def test_a_label_stands_for_the_only_path_or_the_fastest_one() -> None:
    assert full_name("torch mm", {"torch mm", "torch int_mm"}) == "torch mm"
    assert full_name("torch", {"torch mm"}) == "torch mm"
    assert full_name("torch", {"torch mm", "torch int_mm"}) == "torch"
    assert full_name("deepgemm", {"deepgemm, its fastest"}) == "deepgemm, its fastest"


def test_a_baseline_without_a_time_says_so() -> None:
    timed = ["tuned", "torch mm", "torch float32_copy"]
    assert "was not timed, so own kernels" in unknown_line("deepgemm", timed, NAMES)
    assert "'torch' has several paths; expected one of torch mm, torch float32_copy" in unknown_line(
        "torch", timed, NAMES
    )
    given_by_nobody = unknown_line("fastest library", timed, NAMES)
    assert given_by_nobody.startswith("no library was timed")


@pytest.mark.e2e
def test_a_misspelt_baseline_ends_the_run_before_anything_is_timed(
    folder: Path, capfd: pytest.CaptureFixture[str], own_locks: None
) -> None:
    args = ("compare", *LINEAR, "backend=[torch]", "stages.compare.baseline=torch flaot32_convert")
    assert main(args) == 2
    out, error = capfd.readouterr()
    assert "bench:" not in out
    assert error.splitlines()[-1].endswith(
        "no entry named 'torch flaot32_convert'; did you mean 'torch float32_convert'?"
    )
    assert not list(folder.glob("outputs/runs/compare/*/compared.csv"))


@pytest.mark.e2e
def test_a_comparison_that_can_time_nothing_says_why(
    folder: Path, capfd: pytest.CaptureFixture[str], own_locks: None
) -> None:
    assert main(("compare", *LINEAR, "backend=engine_pairs", "output=none")) == 1
    text = " ".join(capfd.readouterr().out.split())
    assert "nothing was timed: no entry of 2 problems can run here, for these reasons: not timed: tuned: " in text
    assert "not timed: vllm cutlass: no NVIDIA GPU: " in text
    assert "stages.compare.baseline" not in text, "nobody set it"
    assert "geomean" not in text
    (path,) = folder.glob("outputs/runs/compare/*/compared.csv")
    assert pd.read_csv(path)["us"].isna().all()


def test_an_impossible_baseline_starts_nothing(refusal: Callable[..., str], folder: Path) -> None:
    text = refusal("compare", *LINEAR, "backend=[torch]", "stages.compare.baseline=torhc mm")
    assert text == "stages.compare.baseline: no entry named 'torhc mm'; did you mean 'torch'?"
