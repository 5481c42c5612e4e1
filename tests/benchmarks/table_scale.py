"""Merging large tuned tables: python tests/benchmarks/table_scale.py [--rows 25000 50000 100000]

Makes a table of so many rows of the shipped one, and a second that is 3 % faster, and runs `gemmpipe merge` on both;
prints what the run says of itself and the CPU seconds (user and system) of the process, less those of merging a few
rows, which starting takes. Both must be linear: a table of 100,000 rows within 5 s on two cores.
"""

import argparse
import csv
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "outputs" / "tuned" / "a8w8_blockscale_tuned_gemm.csv"


def write(path: Path, rows: int, ratio: float) -> None:
    """A table of so many keys."""
    with SHIPPED.open(newline="") as stream:
        known = list(csv.DictReader(stream))
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(known[0]))
        writer.writeheader()
        for number in range(rows):
            row = known[number % len(known)]
            writer.writerow({**row, "N": 16 * (1 + number // len(known)), "us": round(float(row["us"]) * ratio, 4)})


def merge(folder: Path, rows: int) -> tuple[float, str]:
    """CPU seconds of merging two tables of so many rows, and the line with its own times."""
    for name, ratio in (("a", 1.0), ("b", 0.97)):
        write(folder / f"{name}.csv", rows, ratio)
    inputs = f"inputs=[{folder / 'a.csv'},{folder / 'b.csv'}]"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = [
        sys.executable,
        "-m",
        "gemmpipe",
        "merge",
        inputs,
        f"output={folder / 'c.csv'}",
        "kernel=a8w8_blockscale",
    ]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (folder / "c.csv").unlink()
    [total] = [line for line in done.stdout.splitlines() if line.startswith("total")]
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, total


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[25_000, 50_000, 100_000])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start_s, _ = merge(folder, 10)
        for rows in parser.parse_args().rows:
            cpu_s, total = merge(folder, rows)
            print(
                f"2 x {rows:,} rows: {cpu_s - start_s:.1f} s of CPU beside {start_s:.1f} to start; {total}", flush=True
            )


if __name__ == "__main__":
    main()
