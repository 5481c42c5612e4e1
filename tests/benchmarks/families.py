"""Every family on this device at three sizes of M, a Markdown table: python tests/benchmarks/families.py [FAMILY ...]

Runs `gemmpipe quick` for each, with the shapes named in RUNS, and prints of the largest product what was chosen, its
time in us, and the speed-up over the family's baseline, which is named.
"""

import csv
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

SIZES = (16, 256, 4096)
DENSE = ("shapes=llama70b", f"shapes.nsets=[{','.join(str(m) for m in SIZES)}]")
ABSORBED = ("shapes=deepseek_v3_absorbed",)
RUNS: dict[str, tuple[str, ...]] = {
    "a16w16": DENSE,
    "a16w16_atomic": DENSE,
    "a8w8": DENSE,
    "a8w8_bpreshuffle": DENSE,
    "a8w8_blockscale": DENSE,
    "a8w8_blockscale_bpreshuffle": DENSE,
    "a4w4_blockscale": DENSE,
    "batched_bf16": ABSORBED,
    "batched_a8w8": ABSORBED,
    "fmoe": ("shapes=fmoe_qwen3_30b",),
}
LIMIT_S = 120


def run(family: str, arguments: Sequence[str], folder: Path) -> tuple[list[dict[str, str]], float]:
    """The problems' own selections of a run, and its wall time in s; whatever the tool says goes to a log."""
    run_dir = folder / "runs" / family
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "gemmpipe", "quick", f"kernel={family}", *arguments, f"output={folder / 'tuned'}"]
    begin = time.perf_counter()
    with (folder / f"{family}.log").open("w") as log:
        subprocess.run(
            [*command, "retune=true", f"hydra.run.dir={run_dir}"], stdout=log, stderr=log, timeout=LIMIT_S, check=False
        )
    wall_s = time.perf_counter() - begin
    with (run_dir / "selections.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if not row["format"]], wall_s


def largest(rows: Iterable[dict[str, str]]) -> dict[int, dict[str, str]]:
    """Rows of the product with the most bytes at M = 16, by M."""
    by_size: dict[int, list[dict[str, str]]] = {size: [] for size in SIZES}
    for row in rows:
        m = int(float(row.get("M") or row.get("token") or 0))
        if m in by_size:
            by_size[m].append(row)
    return {m: max(found, key=_volume) for m, found in by_size.items() if found}


def _volume(row: dict[str, str]) -> float:
    return float(row.get("N") or row.get("inter_dim") or 0) * float(row.get("K") or row.get("model_dim") or 0)


def cell(row: dict[str, str] | None) -> str:
    """`triton 12.3 us, 1.20x scaled_mm`."""
    if row is None:
        return "-"
    ratio = f", {1 / float(row['ratio']):.2f}x {row['baseline']}" if row["ratio"] else ""
    return f"{row['libtype']} {float(row['us']):.1f}{ratio}"


def product_of(row: dict[str, str]) -> str:
    """The sizes that stay: NxK, with B or the experts where there are any."""
    if row.get("N"):
        batch = f"{int(float(row['B']))}x " if row.get("B") else ""
        return f"{batch}{int(float(row['N']))}x{int(float(row['K']))}"
    return "{} experts, top {}, {}x{}".format(*(row[name] for name in ("expert", "topk", "inter_dim", "model_dim")))


def main() -> None:
    """Run those named, or all."""
    folder = Path("outputs/families").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["| family | product | " + " | ".join(f"M = {m}" for m in SIZES) + " | tuned in |", "|---" * 6 + "|"]
    for family in sys.argv[1:] or RUNS:
        try:
            rows, wall_s = run(family, RUNS[family], folder)
            found = largest(rows)
            cells = " | ".join(cell(found.get(m)) for m in SIZES)
            lines.append(f"| `{family}` | {product_of(next(iter(found.values())))} | {cells} | {wall_s:.0f} s |")
        except (OSError, StopIteration, subprocess.SubprocessError) as error:
            lines.append(f"| `{family}` | {type(error).__name__}: see {folder / (family + '.log')} |")
        print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
