"""The scripts of docs/howto/python_api.md run word for word."""

import json
import os
import re
from pathlib import Path

from forked_programs import Forking

from gemmpipe import get_arch

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "python_api.md"


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
RUN = next(block for block in BLOCKS if "gemmpipe.run(" in block)
TUNE = next(block for block in BLOCKS if "tune_and_save_configs(" in block)


def test_a_run_from_python(folder: Path, forked_programs: Forking) -> None:
    (folder / "script.py").write_text(RUN)
    done = forked_programs.run(folder, os.environ, "script.py", ())
    assert done.returncode == 0, done.stderr
    assert re.search(r"^0 +1 +512 +1024 +torch +[\d.]+$", done.stdout, re.MULTILINE)
    assert "bf16_tuned_gemm.csv')" in done.stdout


def test_the_script_of_the_page_runs(folder: Path, forked_programs: Forking) -> None:
    (folder / "script.py").write_text(TUNE)
    done = forked_programs.run(folder, os.environ, "script.py", ())
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "configs" / f"{get_arch()}-GEMM-MINE.json").read_text())
    assert list(found) == ["small_M", "medium_M"]
    assert str(found) == done.stdout.strip()
    assert "3/3" in done.stderr  # the bar over the three configurations
