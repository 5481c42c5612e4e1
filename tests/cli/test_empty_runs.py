"""A refused command leaves no new files; a run with a row in its journal keeps everything."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pairwise import few

from gemmpipe.cli.main import main

Refusal = Callable[..., str]
ONE = ("kernel=a16w16", "shapes=list", "shapes.items=[[1,256,512]]")


def runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("outputs/runs/*/*"))


@pytest.mark.parametrize(
    "argv",
    few(
        [
            ["shapes=csv", "shapes.path=gone.csv"],
            ["shapes=csv", "shapes.path=broken.csv"],
            ["capture", "shapes=trace", "shapes.path=broken.csv"],
            ["kernel=a16w1"],
            ["stages.screen.kep=3"],
            ["stages.screen.keep=abc"],
            ["merge", "inputs=[broken.csv]", "output=c.csv", "kernel=a16w16"],
            ["verify", "table=gone.csv"],
            ["verify", "table=broken.csv", "kernel=a16w16"],
            ["prebuild", "table=gone.csv"],
            ["replay"],
            ["-m", "shapes=csv", "shapes.path=gone.csv,broken.csv"],
            ["-m", "kernel=a16w16,a8w8", "output="],
            ["shapes=csv", "shapes.path=gone.csv", "output=new/folder", "profile=other/profile.csv"],
        ],
        1,
        4,
        6,
        8,
        10,
        12,
    ),
    ids=" ".join,
)
def test_a_refused_command_leaves_nothing(folder: Path, refusal: Refusal, argv: list[str]) -> None:
    (folder / "broken.csv").write_text("M,N,K\n1,two,3\n")
    if argv[0] != "-m":
        refusal(*argv)
    else:
        assert main(argv) == 2
    assert [path.name for path in folder.iterdir()] == ["broken.csv"]


def test_unreadable_user_code_leaves_nothing(folder: Path, refusal: Refusal) -> None:
    for name, text in {
        "kernel/broken.yaml": "defaults: [/space@_global_.space: broken]\nfamily: broken\n"
        "dtype: null\nout_dtype: null\nbias: null\n",
        "space/broken.yaml": "num_warps: [4]\n",
        "broken.py": "deff broken\n",
    }.items():
        (folder / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mine" / name).write_text(text)
    assert "broken.py:1: SyntaxError" in refusal("--config-dir", "mine", *ONE, "kernel=broken")
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_existing_folders_stay(folder: Path, refusal: Refusal) -> None:
    (folder / "outputs" / "runs").mkdir(parents=True)
    (folder / "mine").mkdir()
    refusal("shapes=csv", "shapes.path=gone.csv", "output=mine/tuned")
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == ["mine", "outputs", "outputs/runs"]


def test_a_run_with_a_row_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["capture", *ONE]) == 0
    (begun,) = runs(folder)
    assert main([f"resume={begun}", "shapes.items=[[1,x,512]]"]) == 2
    assert runs(folder) == [begun]
    assert len((begun / "trials.jsonl").read_text().splitlines()) >= 2


def test_a_sweep_keeps_the_jobs_that_began(folder: Path) -> None:
    assert main(["-m", "capture", *ONE, "shapes.items=[[1,x,512]],[[1,256,512]]"]) == 2
    (sweep,) = runs(folder)
    assert sorted(path.name for path in sweep.iterdir()) == ["1_a16w16_list", "multirun.yaml"]
