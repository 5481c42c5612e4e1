"""Modules that a command loads before it works: those that time nothing run without torch; each names its run."""

import csv
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gemmpipe.cli.main import main

pytestmark = pytest.mark.e2e

COUNTING = """
import json, sys
from gemmpipe.cli.main import main
for argv in json.loads(sys.argv[1]):
    code = main(argv)
    if code:
        sys.exit(f"{argv}: exit code {code}")
    print(*[name for name in ("torch", "triton", "pandas") if name in sys.modules], file=sys.stderr)
"""
ONE = ("kernel=a16w16", "shapes=list", "shapes.items=[[1,64,128]]")
DENSE, EXPERTS = ("kernel=a16w16", "shapes=llama8b"), ("kernel=fmoe", "shapes=fmoe_mixtral_8x7b")
HEADER = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,us\n"


def loaded_by(folder: Path, *lines: tuple[str, ...], environment: Mapping[str, str] | None = None) -> list[set[str]]:
    """Which of torch, triton and pandas one process has loaded after each of its command lines; all must succeed."""
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(folder), **(environment or {})}
    arguments = [sys.executable, "-c", COUNTING, json.dumps(lines)]
    done = subprocess.run(arguments, cwd=folder, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stderr.splitlines()[-len(lines) :]]


def loaded(folder: Path, *argv: str, environment: Mapping[str, str] | None = None) -> set[str]:
    """Which of them a command line has loaded at its end."""
    [found] = loaded_by(folder, argv, environment=environment)
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory in which torch was asked for the CPU's instruction set once."""
    folder = tmp_path_factory.mktemp("home")
    assert "torch" in loaded(folder, "capture", *ONE)
    return folder


def test_commands_that_time_nothing_load_no_torch(home: Path) -> None:
    """In one process, the lightest command first: what one has loaded stays."""
    for name, us in (("a.csv", 9.0), ("b.csv", 8.0)):
        (home / name).write_text(f"{HEADER}gfx942,304,1,64,128,False,bfloat16,bfloat16,False,False,torch,{us}\n")
    share = ("capture", "kernel=a8w8_blockscale", "shapes=llama8b", "stages.capture.cover_pct=80")
    merge = ("merge", "kernel=a16w16", "inputs=[a.csv,b.csv]", "output=c.csv")
    composed, *others = loaded_by(home, ("--cfg", "job"), ("capture", *ONE), share, merge)
    assert composed == set()
    assert all(found <= {"pandas"} for found in others), others
    (row,) = csv.DictReader((home / "c.csv").read_text().splitlines())
    assert (row["libtype"], row["us"]) == ("torch", "8.0")


@pytest.mark.slow
@pytest.mark.parametrize("argv", [ONE, DENSE, EXPERTS], ids=" ".join)
def test_capture_loads_no_torch(home: Path, argv: tuple[str, ...]) -> None:
    assert loaded(home, "capture", *argv) <= {"pandas"}


@pytest.mark.slow
def test_another_limit_of_instructions_is_asked_of_torch(home: Path) -> None:
    argv = ("capture", *ONE)
    assert "torch" in loaded(home, *argv, environment={"ATEN_CPU_CAPABILITY": "default"})


def test_uniting_a_shipped_table_with_itself_loads_no_kernels(home: Path, h200_tables: Path) -> None:
    table = h200_tables / "a8w8_blockscale_tuned_gemm.csv"
    argv = ("kernel=a8w8_blockscale", f"inputs=[{table}]", "output=d.csv")
    line = ("merge", *argv)
    found = loaded_by(home, line, line)  # the second time its rows are the same as those there
    assert all(each <= {"pandas"} for each in found), found


def test_tuned_problems_load_no_torch(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    assert main(["quick", *ONE]) == 0
    assert loaded(home, "quick", *ONE) <= {"pandas"}


def test_a_run_names_itself_first(home: Path) -> None:
    argv = [sys.executable, "-m", "gemmpipe", "capture", *ONE]
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(home)}
    done = subprocess.run(argv, cwd=home, env=variables, capture_output=True, text=True, timeout=600, check=True)
    first = done.stdout.splitlines()[0]
    assert first.startswith("gemmpipe ")
    assert first.endswith(": capture kernel=a16w16 shapes=list 'shapes.items=[[1,64,128]]'")
