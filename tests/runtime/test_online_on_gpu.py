"""Online tuning on a GPU: a miss served at once, tuned by another process, reloaded, and marked provisional."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gemmpipe import online
from gemmpipe.family import load_family
from gemmpipe.tables.store import read

ALONE = pytest.mark.skipif(
    os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1", reason="other tests use the GPUs: run with -n 0"
)
PROGRAM = """
import sys, time, torch
from gemmpipe.runtime import dispatch_report, gemm_a8w8_blockscale

place, deadline = sys.argv[1], time.monotonic() + 600
generator = torch.Generator().manual_seed(3)

def operands(m, n, k):
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    scales = torch.ones(m, k // 128), torch.ones(n // 128, k // 128)
    return [each.to(place) for each in (x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn), *scales)]

given = [operands(8, 512, 1024), operands(100, 512, 1024)]
expected = [x.float() @ w.float().T for x, w, _, _ in given]

def run():
    for each, reference in zip(given, expected):
        torch.testing.assert_close(gemm_a8w8_blockscale(*each).float(), reference, atol=1.0, rtol=0.02)

run()
assert set(dispatch_report().values()) == {"fallback"}, dispatch_report()
print("first", flush=True)
while not set(dispatch_report().values()) <= {"exact", "padded"}:
    assert time.monotonic() < deadline, dispatch_report()
    run()
    time.sleep(0.1)
run()
print(*sorted(dispatch_report().values()), flush=True)
"""


def tuned_beside(tmp_path: Path, place: str, word: str) -> dict[int, str]:
    """The policy of each M's row, tuned by another process while the program runs."""
    data = tmp_path / "data"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))),
        "XDG_DATA_HOME": str(data),
        "GEMMPIPE_ONLINE_TUNING": word,
        "TMPDIR": str(tmp_path),  # device locks of its own
    }
    table = data / "gemmpipe" / "tuned" / "a8w8_blockscale_tuned_gemm.csv"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, place], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "first\n"
        assert not table.exists(), "a miss does not wait for the tuner"
        assert program.stdout.read() == "exact padded\n"
    assert program.returncode == 0
    (folder,) = (data / "gemmpipe" / "online").iterdir()
    deadline = time.monotonic() + 600
    while online.is_running(folder) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not online.is_running(folder), (folder / "tuner.log").read_text()
    rows = read(table, load_family("a8w8_blockscale"))
    assert {(row["N"], row["K"]) for row in rows} == {(512, 1024)}
    return {int(str(row["M"])): str(row["policy"]) for row in rows}


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param(
            "cuda:0",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
        ),
    ],
)
def test_during_the_program(tmp_path: Path, place: str) -> None:
    policies = tuned_beside(tmp_path, place, "1")
    assert set(policies) == {8, 112}, "beyond 64 rows the padded M is tuned"
    assert all("shared_gpu" in policy for policy in policies.values())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("word", ["1", pytest.param("cuda:1", marks=ALONE)])
def test_on_a_spare_gpu(tmp_path: Path, word: str) -> None:
    """`1` means the program's own GPU; a spare GPU 1 is cuda:1."""
    policies = tuned_beside(tmp_path, "cuda:0", word)
    assert set(policies) == {8, 112}
    assert {"shared_gpu" in policy for policy in policies.values()} == {word == "1"}
