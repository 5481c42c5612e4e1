"""Programs that run an engine's real layers in a process of their own, once per version."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("VLLM_CONTRACT", "")
"""The folder of the downloaded versions (`.ci/contract`); empty without them."""
WANTED = os.environ.get("VLLM_CONTRACT_VERSIONS", "").replace("==", "-").split()
"""The versions to test, by the names of their folders; all of them if none is named."""


def downloaded(pattern: str) -> list[str]:
    """The folders of an engine's versions that are to be tested."""
    names = sorted(path.name for path in Path(FOLDER).glob(pattern)) if FOLDER else []
    return [name for name in names if not WANTED or name in WANTED]


@cache
def results(program: str, version: str) -> dict[str, Any]:
    """Findings of this folder's program with this version's real layers."""
    folder = Path(FOLDER) / f"tables-{version}"
    folder.mkdir(exist_ok=True)
    script = Path(__file__).parent / program
    command = [sys.executable, str(script), str(Path(FOLDER) / version), str(Path(FOLDER) / "packages"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
