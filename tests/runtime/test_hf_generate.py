"""The example of generate() runs as a user starts it: captured, tuned, patched, and compared."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_generate.py"


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.e2e
@pytest.mark.slow  # four processes that import transformers
def test_generate_before_and_after(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--folder", "out", "--new", "3", "--tokens", "8", "--batch", "2"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments, "--pipeline", "quick stages.bench.timer.iters=5 backend=[torch]"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "XDG_DATA_HOME": str(tmp_path / "data")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "gemmpipe: 15 of 15 linear layers use tuned products" in done.stdout
    # Four weights' sizes at 2 x 8 and 2 rows; the output embedding at 2 rows alone.
    assert "dispatch steps by key: {'exact': 9}" in done.stdout
    found = re.search(r"logits up to there differ by at most ([\d.]+)% of their spread", done.stdout)
    assert found is not None
    assert float(found[1]) < 10
