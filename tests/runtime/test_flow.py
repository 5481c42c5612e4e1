"""The whole way on the CPU: a model captured, exactly its shapes tuned, run again with tuned products."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gemmpipe
from gemmpipe.runtime import reload

MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(64, 96, bias=False), nn.Linear(64, 64, bias=False)
        self.up, self.down = nn.Linear(64, 128, bias=True), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        q, k, v = torch.split(self.qkv(x), (64, 16, 16), -1)
        y = x + self.o(q * k.repeat(1, 4) + v.repeat(1, 4))
        return y + self.down(nn.functional.silu(self.up(y)))

def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(2))).bfloat16()

def inputs(m):
    return torch.randn(m, 64, generator=torch.Generator().manual_seed(m)).bfloat16()

if __name__ == "__main__":
    with torch.inference_mode():
        made = model()
        for m in (1, 4, 32):
            made(inputs(m))
"""


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "GEMMPIPE_CAPTURE": "seen.csv"}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_capture_tune_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "llm.py").write_text(MODEL)
    run(tmp_path, "gemmpipe.capture", "llm.py")
    with (tmp_path / "seen.csv").open(newline="") as stream:
        seen = {(int(row["M"]), int(row["N"]), int(row["K"])) for row in csv.DictReader(stream)}
    assert seen == {(m, n, k) for m in (1, 4, 32) for n, k in ((96, 64), (64, 64), (128, 64), (64, 128))}
    words = ("kernel=a16w16", "shapes=csv", "shapes.path=seen.csv", "device=cpu", "format=csv")
    said = run(tmp_path, "gemmpipe", *words, "stages.bench.timer.iters=5", "stages.select.max_extra_weight_pct=300")
    (table,) = re.findall(r"^export GEMMPIPE_CONFIG_A16W16=(.+)$", said, re.MULTILINE)
    with Path(table).open(newline="") as stream:
        assert {tuple(int(row[name]) for name in "MNK") for row in csv.DictReader(stream)} == seen

    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", table)
    monkeypatch.setenv("GEMMPIPE_LOG_SELECTION", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    caplog.set_level("INFO", "gemmpipe.runtime")
    reload()
    import llm

    made: nn.Module = llm.model()
    steps: dict[int, set[str]] = {}
    with torch.inference_mode():
        expected = {m: made(llm.inputs(m)) for m in (1, 4, 32, 3, 30, 65)}
        with gemmpipe.patch(made) as patched:
            assert (patched.replaced, patched.linear_layers) == (8, 8)
            for m, before in expected.items():
                caplog.clear()
                torch.testing.assert_close(made(llm.inputs(m)), before, atol=0.1, rtol=0.05)
                steps[m] = set(re.findall(r"outdtype=\S+ .*?: (exact|padded|fallback):", caplog.text))
    found = {m: "+".join(sorted(words)) for m, words in steps.items()}
    assert found == {1: "exact", 4: "exact", 32: "exact", 3: "padded", 30: "padded", 65: "fallback"}
