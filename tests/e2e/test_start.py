"""What a command loads before it works: commands that time nothing run without torch, and each names what it runs."""

import csv
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gemmpipe.core.paths import CHECKOUT

pytestmark = pytest.mark.e2e

COUNTING = """
import sys
from gemmpipe.cli.main import main
code = main(sys.argv[1:])
print(*[name for name in ("torch", "triton", "pandas") if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
ONE = ("kernel=a16w16", "shapes=list", "shapes.items=[[1,64,128]]")
DENSE, EXPERTS = ("kernel=a16w16", "shapes=llama8b"), ("kernel=fmoe", "shapes=fmoe_mixtral_8x7b")
HEADER = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,us\n"


def loaded(folder: Path, *argv: str, environment: Mapping[str, str] | None = None) -> set[str]:
    """Which of torch, triton and pandas a command line has loaded at its end; it must succeed."""
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(folder), **(environment or {})}
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, *argv], cwd=folder, env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory in which torch was asked for the CPU's instruction set once."""
    folder = tmp_path_factory.mktemp("home")
    assert "torch" in loaded(folder, "capture", *ONE)
    return folder


def test_composing_loads_nothing_heavy(home: Path) -> None:
    assert loaded(home, "--cfg", "job") == set()


@pytest.mark.parametrize(
    "argv",
    [ONE, *(pytest.param(words, marks=pytest.mark.slow) for words in (DENSE, EXPERTS))],
    ids=" ".join,
)
def test_capture_loads_no_torch(home: Path, argv: tuple[str, ...]) -> None:
    assert loaded(home, "capture", *argv) <= {"pandas"}


def test_a_share_of_the_workload_is_estimated_without_torch(home: Path) -> None:
    argv = ("capture", "kernel=a8w8_blockscale", "shapes=llama8b", "stages.capture.cover_pct=80")
    assert loaded(home, *argv) <= {"pandas"}


def test_another_limit_of_instructions_is_asked_of_torch(home: Path) -> None:
    argv = ("capture", *ONE)
    assert "torch" in loaded(home, *argv, environment={"ATEN_CPU_CAPABILITY": "default"})


def test_merge_loads_no_torch(home: Path) -> None:
    for name, us in (("a.csv", 9.0), ("b.csv", 8.0)):
        (home / name).write_text(f"{HEADER}gfx942,304,1,64,128,False,bfloat16,bfloat16,False,False,torch,{us}\n")
    assert loaded(home, "merge", "kernel=a16w16", "inputs=[a.csv,b.csv]", "output=c.csv") <= {"pandas"}
    (row,) = csv.DictReader((home / "c.csv").read_text().splitlines())
    assert (row["libtype"], row["us"]) == ("torch", "8.0")


@pytest.mark.skipif(CHECKOUT is None, reason="compares tables of a checkout")
def test_uniting_a_shipped_table_with_itself_loads_no_kernels(home: Path) -> None:
    table = Path(str(CHECKOUT)) / "outputs" / "tuned" / "a8w8_blockscale_tuned_gemm.csv"
    argv = ("kernel=a8w8_blockscale", f"inputs=[{table}]", "output=d.csv")
    assert loaded(home, "merge", *argv) <= {"pandas"}
    assert loaded(home, "merge", *argv) <= {"pandas"}  # its rows are the same as those there


def test_tuned_problems_load_no_torch(home: Path) -> None:
    loaded(home, "quick", *ONE)
    assert loaded(home, "quick", *ONE) <= {"pandas"}


def test_a_run_names_itself_first(home: Path) -> None:
    argv = [sys.executable, "-m", "gemmpipe", "capture", *ONE]
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(home)}
    done = subprocess.run(argv, cwd=home, env=variables, capture_output=True, text=True, timeout=600, check=True)
    first = done.stdout.splitlines()[0]
    assert first.startswith("gemmpipe ")
    assert first.endswith(": capture kernel=a16w16 shapes=list 'shapes.items=[[1,64,128]]'")
