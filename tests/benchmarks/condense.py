"""Condense the journal of an exhaustive run: python tests/benchmarks/condense.py RUN_DIR OUT.jsonl.xz [BACKEND ...]

Keeps every trial of the backends named (triton and gluon unless others are) with its raw samples and the facts of its
builds; `search.recorded=[OUT.jsonl.xz]` replays it.
"""

import sys
from pathlib import Path

from gemmpipe.core.errors import UserError
from gemmpipe.search.recorded import condense, read

if __name__ == "__main__":
    run_dir, target, *backends = sys.argv[1:]
    condense(Path(run_dir), Path(target), tuple(backends or ("triton", "gluon")))
    try:
        recording = read(Path(target))
    except UserError as error:
        Path(target).unlink()
        sys.exit(str(error))
    points = sum(len(outcomes) for outcomes in recording.problems.values())
    print(f"{target}: {len(recording.problems)} problems, {points:,} points, {Path(target).stat().st_size:,} bytes")
