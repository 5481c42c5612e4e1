"""Folders whose names shells, streams and GEMMPIPE_CONFIG_* read in another way: what is printed can be pasted."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gemmpipe.family import load_family
from gemmpipe.report import use_line

ROOT = Path(__file__).parents[1]
WORDS = ("kernel=a16w16", "device=cpu", "shapes=list", "shapes.items=[[8,64,64]]", "timer@stages.bench.timer=quick")


@pytest.fixture
def tuned(tmp_path: Path) -> "subprocess.CompletedProcess[str]":
    """A run in a folder with a blank, into one that ASCII cannot say."""
    folder = tmp_path / "sp ace"
    folder.mkdir()
    words = [sys.executable, "-m", "gemmpipe", *WORDS, "output=ünï", "format=[csv,aiter]"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_no_name_ends_a_run_and_what_is_printed_can_be_pasted(
    tuned: "subprocess.CompletedProcess[str]", tmp_path: Path
) -> None:
    assert tuned.returncode == 0, tuned.stderr
    folder = tmp_path / "sp ace" / "ünï"
    assert (folder / "bf16_tuned_gemm.csv").is_file()
    assert "merge: csv: " in tuned.stdout
    assert "merge: aiter: " in tuned.stdout, "all formats, though the stream cannot say where"
    (line,) = [line for line in tuned.stdout.splitlines() if line.startswith("export ")]
    assert shlex.split(line.encode().decode("unicode_escape")) == [
        "export",
        f"GEMMPIPE_CONFIG_A16W16={folder / 'bf16_tuned_gemm.csv'}",
    ]


def test_a_path_that_the_variable_would_take_apart_is_told() -> None:
    said = use_line(load_family("a16w16"), Path("/runs/12:30/bf16_tuned_gemm.csv"))
    assert said.startswith("GEMMPIPE_CONFIG_A16W16 separates tables by ':': to name /runs/12:30/bf16_tuned_gemm.csv")
