"""All jobs of a sweep are composed and built before the first runs; a configuration is composed once."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.hydra import Hydra
from pairwise import few

from gemmpipe.cli.main import main
from gemmpipe.pipeline.plan import Plan

Refusal = Callable[..., str]


@pytest.mark.parametrize(
    ("argv", "text"),
    few(
        [
            (["kernel=a16w16,a16w61"], "kernel: no option 'a16w61'; did you mean 'a16w16'?"),
            (["search=exhaustive,halvingg"], "search: no option 'halvingg'; did you mean 'halving'?"),
            (["search.trial_fraction=0.1,7"], "search.trial_fraction: 7 given, expected above 0 and at most 1"),
            (["stages.screen.keep=3,abc"], "stages.screen.keep: 'abc' given, expected a whole number"),
            (["kernel=a16w16", "kernel.dtype=bf16,fp9"], "kernel.dtype: 'fp9', expected a dtype such as bfloat16"),
            (
                ["chain=[capture],[bench]"],
                "chain: stage 'bench' needs problems, shortlist, which no earlier stage gives",
            ),
        ],
        0,
        3,
        5,
    ),
)
def test_an_error_in_any_job_is_reported_before_the_first_runs(
    plans: list[Plan], folder: Path, refusal: Refusal, argv: list[str], text: str
) -> None:
    assert text in refusal("-m", *argv)
    assert plans == []
    assert list(folder.iterdir()) == []


def test_an_error_in_the_users_own_code_too(plans: list[Plan], folder: Path, refusal: Refusal) -> None:
    for name, text in {
        "mine/search/broken.yaml": "_target_: broken.Broken\n",
        "mine/broken.py": "raise ValueError('not today')\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert "mine/broken.py:1: ValueError: not today" in refusal("-m", "--config-dir=mine", "search=halving,broken")
    assert plans == []


def test_values_may_refer_to_the_job(plans: list[Plan]) -> None:
    assert main(["-m", "kernel=a16w16,a8w8", "output=job${hydra:job.num}"]) == 0
    assert [plan.output for plan in plans] == ["job0", "job1"]


def test_a_sweep_without_arguments_is_refused(plans: list[Plan], folder: Path, refusal: Refusal) -> None:
    """`gemmpipe -m` is the beginning of a line, and tuning takes hours; a user's pipeline may hold the values."""
    for argv in (["-m"], ["-m", "verify"]):
        assert refusal(*argv).startswith("-m: nothing is swept; expected values with commas")
    (folder / "mine").mkdir()
    sweep = "defaults: [tune, _self_]\nhydra: {sweeper: {params: {batch: '3,4'}}}\n"
    (folder / "mine" / "nightly.yaml").write_text(sweep)
    assert main(["-m", "nightly", "--config-dir=mine"]) == 0
    assert [plan.batch for plan in plans] == [3, 4]


@pytest.mark.parametrize(
    ("argv", "warned"),
    few(
        [
            (["-m", "kernel=a16w16", "shapes.nsets=[1,64]"], True),
            (["-m", "kernel=a16w16,a8w8"], False),
            (["-m", "batch=range(1,3)"], False),
            (["kernel=a16w16"], False),
        ],
        0,
        1,
    ),
)
def test_a_sweep_of_nothing_warns_and_runs(
    plans: list[Plan], capsys: pytest.CaptureFixture[str], argv: list[str], warned: bool
) -> None:
    assert main(argv) == 0
    line = "warning: -m: nothing is swept; a sweep has values with commas, as in -m search=halving,exhaustive\n"
    assert capsys.readouterr().err == (line if warned else "")
    assert plans


@pytest.mark.parametrize(
    ("more", "composed"),
    few([((), 0), (("-m",), 0), (("hydra.mode=RUN",), 1), (("--config-dir=own",), 1)], 1, 2),
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_configuration_is_composed_for_hydras_mode_only_where_it_may_be_set(
    more: tuple[str, ...],
    composed: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(Hydra, "get_mode", lambda self, **named: asked.append(named))
    (folder / "own").mkdir()
    counted = Hydra.get_mode
    shapes = ("shapes=list", "shapes.items=[{M: [1,2], N: 64, K: 64}]")
    kernels = "kernel=a16w16,a8w8_blockscale" if "-m" in more else "kernel=a16w16"
    assert main(["capture", kernels, *shapes, "device=cpu", *more]) == 0, capsys.readouterr().err
    assert len(asked) == composed
    assert Hydra.get_mode is counted
