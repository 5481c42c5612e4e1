"""Modules that a command loads before it works: those that time nothing run without torch; each names its run."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from gemmpipe.cli.main import main

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

COUNTING = """
import json, sys
from gemmpipe.cli.main import main
for argv in json.loads(sys.argv[1]):
    print(f"-- {argv[0]}", flush=True)
    code = main(argv)
    if code:
        sys.exit(f"{argv}: exit code {code}")
    print(*[name for name in ("torch", "triton", "pandas") if name in sys.modules], file=sys.stderr)
"""
MODULES = {"torch", "triton", "pandas"}
ONE = ("kernel=a16w16", "shapes=list", "shapes.items=[[1,64,128]]")
DENSE, EXPERTS = ("kernel=a16w16", "shapes=llama8b"), ("kernel=fmoe", "shapes=fmoe_mixtral_8x7b")
HEADER = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,us\n"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that ran command lines."""

    loaded: list[set[str]]
    """Which of torch, triton and pandas it had loaded after each of them."""
    printed: list[str]
    """What each of them printed."""


def ran(folder: Path, *lines: tuple[str, ...], environment: Mapping[str, str] | None = None) -> Ended:
    """One process for all command lines, each of which must succeed."""
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(folder), **(environment or {})}
    arguments = [sys.executable, "-c", COUNTING, json.dumps(lines)]
    done = subprocess.run(arguments, cwd=folder, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    loaded = [set(line.split()) for line in done.stderr.splitlines() if set(line.split()) <= MODULES]
    assert len(loaded) == len(lines), done.stderr
    printed = re.split(r"^-- .*\n", done.stdout, flags=re.MULTILINE)[1:]
    return Ended(loaded=loaded, printed=printed)


def loaded(folder: Path, *argv: str, environment: Mapping[str, str] | None = None) -> set[str]:
    """Which of them a command line has loaded at its end."""
    [found] = ran(folder, argv, environment=environment).loaded
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory in which torch was asked for the CPU's instruction set once."""
    folder = tmp_path_factory.mktemp("home")
    assert "torch" in loaded(folder, "capture", *ONE)
    return folder


@pytest.fixture(scope="module")
def light(home: Path, h200_tables: Path) -> Ended:
    """A process for commands that time nothing, the lightest first: what one has loaded stays."""
    for name, us in (("a.csv", 9.0), ("b.csv", 8.0)):
        (home / name).write_text(f"{HEADER}gfx942,304,1,64,128,False,bfloat16,bfloat16,False,False,torch,{us}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["quick", *ONE]) == 0
    share = ("capture", "kernel=a8w8_blockscale", "shapes=llama8b", "stages.capture.cover_pct=80")
    merge = ("merge", "kernel=a16w16", "inputs=[a.csv,b.csv]", "output=c.csv")
    table = h200_tables / "a8w8_blockscale_tuned_gemm.csv"
    unite = ("merge", "kernel=a8w8_blockscale", f"inputs=[{table}]", "output=d.csv")
    # The second time the rows of `unite` are the same as those there; those of `quick` are tuned.
    return ran(home, ("--cfg", "job"), ("capture", *ONE), share, merge, ("quick", *ONE), unite, unite)


def test_commands_that_time_nothing_load_no_torch(light: Ended, home: Path) -> None:
    composed, *others = light.loaded
    assert composed == set()
    assert all(found <= {"pandas"} for found in others), others
    (row,) = csv.DictReader((home / "c.csv").read_text().splitlines())
    assert (row["libtype"], row["us"]) == ("torch", "8.0")


def test_a_run_names_itself_first(light: Ended) -> None:
    first = light.printed[1].splitlines()[0]
    assert first.startswith("gemmpipe ")
    assert first.endswith(": capture kernel=a16w16 shapes=list 'shapes.items=[[1,64,128]]'")


def test_tuned_problems_are_told_and_uniting_again_changes_nothing(light: Ended, home: Path) -> None:
    assert "1 already tuned" in light.printed[4]
    assert (home / "d.csv").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("argv", [ONE, DENSE, EXPERTS], ids=" ".join)
def test_capture_loads_no_torch(home: Path, argv: tuple[str, ...]) -> None:
    assert loaded(home, "capture", *argv) <= {"pandas"}


@pytest.mark.slow
def test_another_limit_of_instructions_is_asked_of_torch(home: Path) -> None:
    argv = ("capture", *ONE)
    assert "torch" in loaded(home, *argv, environment={"ATEN_CPU_CAPABILITY": "default"})
