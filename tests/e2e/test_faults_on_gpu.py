"""A GPU whose context is lost, that hangs, that has no memory left: each ends as a row, and the healthy win."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FOLDER = Path(__file__).parents[1] / "faulty_gpu"
EXPECTED = {
    "right": {"ok", "pruned"},
    "illegal": {"launch_error"},
    "endless": {"timeout"},
    "too_much": {"launch_error"},
    "wrong": {"incorrect"},
}


def test_each_fault_is_a_row_and_the_next_trial_runs(tmp_path: Path) -> None:
    arguments = ["kernel=poison", "shapes=list", "shapes.items=[[16,256,256],[64,256,256]]", "backend=[poison]",
             f"space.KIND=[{','.join(EXPECTED)}]",
             "executor.timeout_s=5", "profile=profile.csv", "format=[csv]"]  # fmt: skip
    command = [sys.executable, "-m", "gemmpipe", "--config-dir", str(FOLDER), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "profile.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    found = {(row["M"], row["config"]): row["status"] for row in rows}
    assert len(found) == 2 * len(EXPECTED)
    for (_, config), status in found.items():
        kind = next(name for name in EXPECTED if name in config)
        assert status in EXPECTED[kind], (config, status)
