"""The script of docs/python_api.md runs unchanged."""

import json
import re
import subprocess
import sys
from pathlib import Path

from gemmpipe import get_arch

PAGE = Path(__file__).parents[2] / "docs" / "python_api.md"


def test_the_script_of_the_page_runs(folder: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (folder / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=600, check=True)
    found = json.loads((folder / "configs" / f"{get_arch()}-GEMM-MINE.json").read_text())
    assert list(found) == ["small_M", "medium_M"]
    assert str(found) == done.stdout.strip()
    assert "3/3" in done.stderr  # the bar over the three configurations
