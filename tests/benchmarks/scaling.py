"""How tuning scales over the GPUs of a host: python tests/benchmarks/scaling.py [--workers 4 2 1] [--cores 4 8 16 32]

288 problems (16 products of four models, 18 Ms each) in a reduced space, so that one H200 needs about 100 s with a
warm compile cache. First a run that fills the cache, then one for each number of workers: t1 / (n * tn), where t runs
from the moment when all workers are ready to the end of the last stage (manifest.json says both). `--cores` compiles
from an empty cache with so many processes (`executor.compile_workers`) and prints how long devices waited for builds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PRODUCTS = (  # N, K of Llama 70B and Qwen3 32B over 8 and 4 GPUs, Llama 8B and Qwen3 8B over 1
    *((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)),
    *((2560, 5120), (5120, 2048), (12800, 5120), (5120, 6400)),
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    *((10240, 8192), (24576, 4096), (4096, 12288), (8192, 7168)),
)
MS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
SPACE = (
    "space.GROUP_SIZE_M=[1]",
    "space.BLOCK_SIZE_K=[128]",
    "space.num_stages=[3,4]",
    "space.num_warps=[4,8]",
    "space.NUM_KSPLIT=[1,4]",
)


def arguments(products: int) -> list[str]:
    """The tuning command for so many of the products."""
    items = ",".join(f"{{M: [{','.join(map(str, MS))}], N: {n}, K: {k}}}" for n, k in PRODUCTS[:products])
    return ["kernel=a8w8_blockscale", "shapes=list", f"shapes.items=[{items}]", "format=[csv]", "batch=1000", *SPACE]


def tune(folder: Path, cache: Path, given: list[str]) -> tuple[dict[str, object], float]:
    """One run: its manifest, and the seconds of the whole process."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "gemmpipe", *given, f"hydra.run.dir={folder}", f"output={folder / 'tuned'}"],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(done.args)}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return json.loads((folder / "manifest.json").read_text()), time.monotonic() - begun


def seconds(manifest: dict[str, object]) -> float:
    """From the moment when all workers are ready to the end of the last stage."""
    account = dict(manifest["account_s"])  # type: ignore[call-overload]
    stages = sum(account[f"{stage}_s"] for stage in ("screen", "bench", "select", "merge"))
    return float(stages - account["idle_until_workers_ready_s"])


def line(name: str, manifest: dict[str, object], whole_s: float) -> str:
    """Times of one run and where its devices were idle."""
    account = dict(manifest["account_s"])  # type: ignore[call-overload]
    times = ", ".join(f"{k[:-2]} {v:.1f}" for k, v in account.items() if k.endswith("_s"))
    devices = [r for r in manifest["resources"] if ":" in r["name"]]  # type: ignore[attr-defined]
    idle = " ".join(f"{r['idle_s']:.1f}" for r in devices)
    return f"{name}: t {seconds(manifest):.1f} s (process {whole_s:.1f}; {times}); idle by device {idle}"


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=[4, 2, 1])
    parser.add_argument("--cores", type=int, nargs="*", default=[])
    parser.add_argument("--products", type=int, default=len(PRODUCTS))
    given = parser.parse_args()
    base = arguments(given.products)
    root = Path(tempfile.mkdtemp(prefix="scaling-"))
    most = max(given.workers)
    print(" ".join(["gemmpipe", *base]))
    print(
        line(f"{most} workers, cold cache", *tune(root / "cold", root / "cache", [*base, f"executor.workers={most}"]))
    )
    times = {}
    for n in given.workers:
        manifest, whole_s = tune(root / f"warm{n}", root / "cache", [*base, f"executor.workers={n}"])
        times[n] = seconds(manifest)
        print(line(f"{n} workers, warm cache", manifest, whole_s), flush=True)
    for n in times if 1 in times else ():
        print(f"{len(MS) * given.products} problems: t1 {times[1]:.1f} s, t{n} {times[n]:.1f} s, "
              f"t1 / ({n} * t{n}) = {times[1] / (n * times[n]):.3f}", flush=True)  # fmt: skip
    for cores in given.cores:
        one = [*base, f"executor.workers={most}", f"executor.compile_workers={cores}"]
        found = tune(root / f"cores{cores}", root / f"cache{cores}", one)
        print(line(f"{most} workers, {cores} compile processes", *found), flush=True)


if __name__ == "__main__":
    main()
