"""Reading large journals: python tests/benchmarks/journal_scale.py [--rows 250000 500000 1000000]

Writes journals of so many trials as a run does and reads each back in a process of its own; prints the seconds and the
most memory that process held. Both must be linear: 1,000,000 rows within 20 s and 2 GiB on two cores.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from gemmpipe.core.data import Candidate, Status, Trial
from gemmpipe.core.device import arch_device
from gemmpipe.journal import Journal

_READ = """
import resource, sys, time
from pathlib import Path
from gemmpipe import journal
begun = time.monotonic()
record = journal.read(Path(sys.argv[1]))
print(record.count, time.monotonic() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def write(folder: Path, rows: int, problems: int = 400) -> int:
    """A journal of so many trials; its bytes."""
    chance = random.Random(0)
    candidates = [
        Candidate.of("triton", {"BLOCK_SIZE_M": 16 << (i % 5), "BLOCK_SIZE_N": 32 << (i % 4), "GROUP_SIZE_M": i})
        for i in range(rows // problems)
    ]
    journal = Journal(folder)
    journal.write("session", device=asdict(arch_device("sm_90")))
    for number in range(problems):
        name = f"f M={number} N=1280 K=8192"
        journal.write("problem", id=name, key={"M": number, "N": 1280, "K": 8192}, weight=1.0, layer="")
        for candidate in candidates:
            samples = (round(chance.uniform(5, 500), 4), round(chance.uniform(5, 500), 4))
            journal.trial(
                Trial(
                    stage="screen", problem=name, candidate=candidate, status=Status.OK, launches=2, samples_us=samples
                )
            )
    journal.close()
    return journal.path.stat().st_size


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[250_000, 500_000, 1_000_000])
    for rows in parser.parse_args().rows:
        with tempfile.TemporaryDirectory() as folder:
            size = write(Path(folder), rows)
            arguments = [sys.executable, "-c", _READ, folder]
            done = subprocess.run(arguments, capture_output=True, text=True, check=True)
            count, seconds, gib = done.stdout.split()
            print(
                f"{int(count):,} trials, {size / 1e6:.0f} MB: read in {float(seconds):.1f} s with {float(gib):.2f} GiB"
            )


if __name__ == "__main__":
    main()
