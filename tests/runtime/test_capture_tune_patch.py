"""End to end on the CPU: a model captured, exactly its shapes tuned, run again with tuned products."""

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
from transformers import LlamaConfig, LlamaForCausalLM

def model():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=1, vocab_size=96)
    return LlamaForCausalLM(config).bfloat16().eval()

def inputs(m):
    return torch.arange(m)[None] % 96

if __name__ == "__main__":
    with torch.inference_mode():
        made = model()
        for m in (1, 4, 32):
            made(inputs(m))
"""


SHAPES = ((64, 64), (16, 64), (128, 64), (64, 128), (96, 64))
"""(N, K) of q and o, k and v, gate and up, down, head."""


def run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "GEMMPIPE_CAPTURE": "seen.csv"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_capture_tune_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "llm.py").write_text(MODEL)
    run(tmp_path, "gemmpipe.capture", "llm.py")
    with (tmp_path / "seen.csv").open(newline="") as stream:
        seen = {(int(row["M"]), int(row["N"]), int(row["K"])) for row in csv.DictReader(stream)}
    assert seen == {(m, n, k) for m in (1, 4, 32) for n, k in SHAPES}
    arguments = ("kernel=a16w16", "shapes=csv", "shapes.path=seen.csv", "device=cpu", "format=csv")
    message = run(
        tmp_path, "gemmpipe", *arguments, "stages.bench.timer.iters=5", "stages.select.max_extra_weight_pct=300"
    )
    (table,) = re.findall(r"^export GEMMPIPE_CONFIG_A16W16=(.+)$", message, re.MULTILINE)
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
        expected = {m: made(llm.inputs(m)).logits for m in (1, 4, 32, 3, 30, 65)}
        with gemmpipe.patch(made) as patched:
            assert (patched.replaced, patched.linear_layers) == (15, 15)
            for m, before in expected.items():
                caplog.clear()
                torch.testing.assert_close(made(llm.inputs(m)).logits, before, atol=0.1, rtol=0.05)
                steps[m] = set(re.findall(r"outdtype=\S+ .*?: (exact|padded|fallback):", caplog.text))
    found = {m: "+".join(sorted(arguments)) for m, arguments in steps.items()}
    assert found == {1: "exact", 4: "exact", 32: "exact", 3: "padded", 30: "padded", 65: "fallback"}


@pytest.mark.slow
def test_the_example_goes_the_whole_way(tmp_path: Path) -> None:
    arguments = ["--tiny", "--precision", "fp8", "--device", "cpu", "--folder", "out", "--seconds", "0.1"]
    arguments += ["--rows", "1", "4", "32", "--unseen", "3", "65", "--pipeline", "quick stages.bench.timer.iters=5"]
    example = Path(__file__).parents[2] / "examples" / "llama.py"
    environment = {**os.environ, "PYTHONPATH": str(example.parents[1])}
    done = subprocess.run(
        [sys.executable, str(example), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "dispatch steps: {'exact': 15}" in done.stdout  # four products and the head, three row counts
    assert "{'exact': 15, 'padded': 5, 'fallback': 4} (3: padded, 65: fallback)" in done.stdout
    assert len(re.findall(r"decode, batch \d+, eager: [\d,]+ -> [\d,]+ tokens/s", done.stdout)) == 3
