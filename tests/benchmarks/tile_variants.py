"""Time of tiles of 256 rows, and of wide tiles at each warpgroup's own pace, beside the other block-scaled ones; a GPU.

    python tests/benchmarks/tile_variants.py --out FILE.csv [--limit-s 150] [--products 512x4608x7168,...] [--odd]

For each product: tiles with two products in flight or in turns (`old`), those at own pace (`new`), and shipped winners
of either kind. Wide new ones are also compiled by the later ptxas that Triton includes for Blackwell (or --ptxas). All
are compiled first, in parallel, and checked against the reference, over NaN. One pass times all of them; then the
fastest of both kinds take turns, in CUDA graphs over weights that rotate through 200 MB, for both memory orders of
x_scale. Prints one line a product and order; FILE has a row for every candidate. --odd: first checks results of sizes
that fit no tile. --refine: only the leaders of an earlier run, and those with constant N and K (counted as `new`).
--add: instead of tiles, shipped winners with further knobs. Stops at --limit-s.
"""

import argparse
import csv
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from scale_layouts import ROTATE_BYTES, time_us

from gemmpipe.core.data import Build, BuildFacts, Device, Knobs, Scalar
from gemmpipe.core.device import gpu_device
from gemmpipe.core.paths import shipped_tables
from gemmpipe.family import GemmSpec, Inputs, KernelDefaults, Operands, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.kernels.a8w8_blockscale._gluon import BlockscaleWarpSpecialised
from gemmpipe.launch import build as builds
from gemmpipe.tables import store
from gemmpipe.templates.params import BLOCK_SCALED_KNOBS

FAMILY = load_family("a8w8_blockscale")
KERNEL = next(i for i in FAMILY.implementations if isinstance(i, BlockscaleWarpSpecialised))
LOST = (
    "512x4608x7168 4096x7168x16384 4096x1280x8192 4096x2112x7168 1024x2112x7168 512x32768x512 1024x32768x512"
    " 4096x32768x512 4096x24576x1536 512x2112x7168 4096x4608x7168 4096x1536x7168 4096x7168x18432 1024x1536x7168"
    " 1024x7168x8192 1024x4608x7168 2048x7168x8192 4096x8192x3584 4096x7168x2048 1024x24576x1536 512x7168x16384"
)
ODD = "260x1320x1040 1001x520x128 515x2120x1200 4095x1288x640 259x264x2432"
ORDERS = ("column", "row")
LEAST_CALLS, SCREENS, REPLAYS, KEPT = 12, 2, 7, 4


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Knobs, and the ptxas that compiles them ("": Triton's own)."""

    knobs: Knobs
    ptxas: str
    new: bool

    @property
    def text(self) -> str:
        """In a few characters."""
        knobs = self.knobs
        tile = f"{knobs['BLOCK_SIZE_M']}x{knobs['BLOCK_SIZE_N']} s{knobs['num_stages']} g{knobs['GROUP_SIZE_M']}"
        more = [f"k/{knobs['NUM_KSPLIT']}"] if knobs["NUM_KSPLIT"] != 1 else []
        more += [f"c{knobs['CLUSTER_SIZE']}"] if "CLUSTER_SIZE" in knobs else []
        more += [name.lower() for name in BLOCK_SCALED_KNOBS if knobs.get(name)]
        return " ".join([tile, *more, *(["ptxas+"] if self.ptxas else [])])


def tile(m: int, n: int, stages: int, group: int, cluster: int, **more: Scalar) -> dict[str, Scalar]:
    """Knobs of a tile."""
    sides = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": group, "NUM_KSPLIT": 1}
    return {"kernel_type": "warp_specialised", **sides, "num_stages": stages, "CLUSTER_SIZE": cluster, **more}


def old_tiles() -> Iterator[dict[str, Scalar]]:
    """Tiles with two products in flight, and wide ones in turns; without split-K."""
    for n, stages in ((64, 8), (80, 8), (96, 7), (128, 6), (128, 5), (160, 5), (192, 5)):
        for group, cluster in ((8, 1), (2, 2), (16, 1)):
            yield tile(128, n, stages, group, cluster)


def new_tiles() -> Iterator[dict[str, Scalar]]:
    """Tiles of 256 and 128 rows at each warpgroup's own pace."""
    for group, cluster in ((4, 1), (2, 2), (8, 2), (16, 1)):
        for n, stages in ((64, 5), (80, 4), (96, 4), (112, 4), (128, 3), (128, 4)):
            yield tile(256, n, stages, group, cluster)
        for n, stages in ((64, 8), (96, 7), (112, 7), (128, 6), (128, 5), (144, 6), (160, 5), (192, 5)):
            yield tile(128, n, stages, group, cluster, OWN_PACE=True)
            if n <= 128:
                yield tile(128, n, stages, group, cluster, OWN_PACE=True, TWO_IN_FLIGHT=True)


def spec_of(product: str, device: Device) -> GemmSpec:
    """The product MxNxK."""
    m, n, k = map(int, product.split("x"))
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    return FAMILY.spec(make_problem(FAMILY, {"M": m, "N": n, "K": k}, defaults, device.gfx, "case"))


def shipped(product: str, device: Device) -> Iterator[dict[str, Scalar]]:
    """The knobs of warp-specialised winners of the same N and K, and of the nearest M."""
    m, n, k = map(int, product.split("x"))
    rows = [row for row in store.read(shipped_tables() / FAMILY.csv_name, FAMILY) if row["libtype"] == "gluon"]
    same = [row for row in rows if (row["gfx"], row["N"], row["K"]) == (device.gfx, n, k)]
    for row in sorted(same, key=lambda row: abs(math.log(int(str(row["M"])) / m)))[:2]:
        yield dict(json.loads(str(row["config"])))


def variants(product: str, device: Device, later: str) -> list[Variant]:
    """Those that the product supports, each once."""
    spec, found = spec_of(product, device), {}
    for knobs in (*shipped(product, device), *old_tiles(), *new_tiles()):
        kept = KERNEL.normalise(spec, knobs, device)
        if KERNEL.unsupported_reason(spec, kept, device) or KERNEL.dominated_reason(spec, kept, device):
            continue
        new = bool(kept.get("OWN_PACE"))
        wide = new and (knobs["GROUP_SIZE_M"], knobs.get("CLUSTER_SIZE")) == (8, 2) and knobs["BLOCK_SIZE_N"] > 96
        for ptxas in ("", later) if later and wide else ("",):
            found[json.dumps([kept, ptxas], sort_keys=True)] = Variant(knobs=kept, ptxas=ptxas, new=new)
    return list(found.values())


def adding(product: str, names: list[str], device: Device) -> list[Variant]:
    """Shipped winners (`old`), each with one of these knobs and with all of them (`new`)."""
    spec, found = spec_of(product, device), {}
    for knobs in shipped(product, device):
        for more in ([], *([name] for name in names), names):
            kept = KERNEL.normalise(spec, {**knobs, **dict.fromkeys(more, True)}, device)
            if not KERNEL.unsupported_reason(spec, kept, device):
                found[json.dumps(kept, sort_keys=True)] = Variant(knobs=kept, ptxas="", new=bool(more))
    return list(found.values())


def refined(product: str, rows: list[dict[str, str]], device: Device, later: str) -> list[Variant]:
    """The fastest variants of an earlier run's FILE, and the leading ones with constant N and K."""
    spec, found = spec_of(product, device), {}
    for new in ("False", "True"):
        for order in ORDERS:
            of = [row for row in rows if (row["product"], row["new"], row["order"]) == (product, new, order)]
            of = [row for row in of if float(row["wrong"]) < 0.01]
            of.sort(key=lambda row: (-int(row["replays"]), float(row["us"])))
            for rank, row in enumerate(of[:3]):
                ptxas, knobs = later if "ptxas+" in row["variant"] else "", json.loads(row["knobs"])
                for constant in (False, True) if rank < 2 else (False,):
                    kept = KERNEL.normalise(spec, {**knobs, "CONSTANT_NK": constant}, device)
                    variant = Variant(knobs=kept, ptxas=ptxas, new=constant or new == "True")
                    found[json.dumps([kept, ptxas], sort_keys=True)] = variant
    return list(found.values())


def use_ptxas(path: str) -> None:
    """Compile, and look up in Triton's cache, with this one."""
    from triton.backends.nvidia import compiler

    if os.environ.get("TRITON_PTXAS_PATH", "") == path:
        return
    os.environ.pop("TRITON_PTXAS_PATH", None)
    if path:
        os.environ["TRITON_PTXAS_PATH"] = path
    for function in (compiler.get_ptxas, compiler.get_ptxas_version):
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    builds._load.cache_clear()


def compiled(build: Build, device: Device, ptxas: str) -> BuildFacts | str:
    """Compile into Triton's disk cache; the error's last line if that fails."""
    try:
        use_ptxas(ptxas)
        return builds.compile_build(build, device)
    except Exception as error:  # noqa: BLE001  (any error of the compiler is a row's)
        return (str(error).strip() or repr(error)).splitlines()[-1]


def builds_of(spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
    """Those of both memory orders."""
    assert spec.x_scale is not None
    specs = [replace(spec, x_scale=replace(spec.x_scale, order=order)) for order in ORDERS]
    return tuple(dict.fromkeys(build for each in specs for build in KERNEL.builds(each, knobs, device)))


def compile_all(cases: Mapping[str, list[Variant]], device: Device) -> dict[tuple[Build, str], BuildFacts | str]:
    """All builds, in parallel."""
    wanted = {
        (build, variant.ptxas): None
        for product, chosen in cases.items()
        for variant in chosen
        for build in builds_of(spec_of(product, device), variant.knobs, device)
    }
    begin = time.perf_counter()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures = {each: pool.submit(compiled, each[0], device, each[1]) for each in wanted}
        found = {each: future.result() for each, future in futures.items()}
    failed = {str(each) for each in found.values() if isinstance(each, str)}
    print(f"{len(found)} builds in {time.perf_counter() - begin:.0f} s", *failed, sep="\n", flush=True)
    return found


@dataclass(frozen=True, kw_only=True)
class Case:
    """A product's operands, with x_scale in both orders, and its result."""

    spec: GemmSpec
    inputs: Mapping[str, Inputs]
    weights: list[Weights]
    reference: torch.Tensor


def operands(spec: GemmSpec, device: Device) -> Case:
    """Weights that rotate through 200 MB, and the reference of the first."""
    generator = torch.Generator(device=device.torch_name).manual_seed(5)
    first, inputs = FAMILY.make_weights(spec, generator), FAMILY.make_inputs(spec, generator)
    assert inputs.x_scale is not None
    count = min(64, max(2, math.ceil(ROTATE_BYTES / (spec.n * spec.k))))
    rows = inputs.x_scale.contiguous()
    padded = torch.zeros(rows.shape[1], -(-spec.m // 4) * 4, device=device.torch_name)
    columns = padded[:, : spec.m].copy_(rows.t()).t()
    laid = {"row": replace(inputs, x_scale=rows), "column": replace(inputs, x_scale=columns)}
    weights = [first, *(replace(first, w=first.w.clone()) for _ in range(count - 1))]
    return Case(spec=spec, inputs=laid, weights=weights, reference=FAMILY.reference(spec, inputs, first))


@dataclass(kw_only=True)
class Timed:
    """A variant's launches of one memory order in a graph."""

    variant: Variant
    order: str
    error: float
    graph: torch.cuda.CUDAGraph
    calls: int
    times: list[float]


def bound(case: Case, variant: Variant, order: str, device: Device, out: torch.Tensor) -> list[Callable[[], object]]:
    """A launch for each weight."""
    use_ptxas(variant.ptxas)
    spec, knobs, inputs = case.spec, variant.knobs, case.inputs[order]
    bind = KERNEL.binder(spec, knobs, device)
    prepared = [KERNEL.prepare(spec, each, knobs) for each in case.weights]
    return [bind(Operands(inputs=inputs, prepared=each, out=out)) for each in prepared]


def checked(case: Case, launches: list[Callable[[], object]], out: torch.Tensor) -> float:
    """The share of wrong elements of the first launch."""
    out.fill_(float("nan"))
    launches[0]()
    torch.cuda.synchronize()
    return error_ratio(out, case.reference, *FAMILY.tolerance(case.spec))


def graphed(case: Case, variant: Variant, order: str, device: Device, out: torch.Tensor) -> Timed:
    """Check a variant, and capture its launches."""
    launches = bound(case, variant, order, device, out)
    error = checked(case, launches, out)
    calls, graph = max(LEAST_CALLS, len(launches)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            launches[i % len(launches)]()
    return Timed(variant=variant, order=order, error=error, graph=graph, calls=calls, times=[])


def take_turns(timed: list[Timed], replays: int) -> None:
    """Replay each so often, in turns."""
    for each in timed:
        each.graph.replay()
    for _ in range(replays):
        for each in timed:
            each.times.append(time_us(each.graph, each.calls))


def measure(product: str, chosen: list[Variant], device: Device) -> list[Timed]:
    """All variants briefly, then the fastest of both kinds in turns, for both orders."""
    case = operands(spec_of(product, device), device)
    out = torch.empty(case.spec.out_shape, dtype=getattr(torch, case.spec.out_dtype), device=device.torch_name)
    first = [graphed(case, each, "column", device, out) for each in chosen]
    take_turns(first, SCREENS)
    finals = []
    for new in (False, True):
        right = [each for each in first if each.variant.new == new and each.error < 0.01]
        right.sort(key=lambda each: min(each.times))
        ahead = right[:KEPT]
        if new:  # one of each kind, whatever its rank
            kinds = {each.variant.text.split()[0]: each for each in reversed(right)}
            ahead += [each for each in kinds.values() if each not in ahead]
        finals += ahead
    for each in finals:
        each.times.clear()
    finals += [graphed(case, each.variant, "row", device, out) for each in finals]
    take_turns(finals, REPLAYS)
    return [*finals, *(each for each in first if each not in finals)]


def line(product: str, order: str, done: list[Timed]) -> str:
    """The best of both kinds."""
    best = []
    for new in (False, True):
        those = [t for t in done if t.order == order and t.variant.new == new and len(t.times) == REPLAYS]
        those = [t for t in those if t.error < 0.01]
        if not those:
            return f"{product} {order}: none right"
        best.append(min(those, key=lambda each: statistics.median(each.times)))
    old, new = (statistics.median(each.times) for each in best)
    printed = f"{best[0].variant.text:28} | {best[1].variant.text}"
    return f"{product:16} {order:6} {old:8.2f} {new:8.2f} {old / new:6.3f}  {printed}"


def rows_of(product: str, done: list[Timed], facts: Mapping[tuple[Build, str], BuildFacts | str], device: Device):
    """A row for each, with the spills of its builds."""
    for each in done:
        own = builds_of(spec_of(product, device), each.variant.knobs, device)
        found = [facts[build, each.variant.ptxas] for build in own]
        spills = max((fact.spills or 0) for fact in found if not isinstance(fact, str))
        yield {
            "product": product, "order": each.order, "new": each.variant.new, "variant": each.variant.text,
            "us": round(statistics.median(each.times), 3), "replays": len(each.times), "wrong": round(each.error, 5),
            "spills": spills, "knobs": json.dumps(each.variant.knobs, sort_keys=True),
        }  # fmt: skip


def check_odd(cases: Mapping[str, list[Variant]], device: Device) -> None:
    """Sizes that fit no tile: each kind of new tile in both orders."""
    wrong = ran = 0
    for product, chosen in cases.items():
        case = operands(spec_of(product, device), device)
        out = torch.empty(case.spec.out_shape, dtype=getattr(torch, case.spec.out_dtype), device=device.torch_name)
        for variant in chosen:
            for order in ORDERS:
                error = checked(case, bound(case, variant, order, device, out), out)
                ran += 1
                if not error < 0.01:
                    wrong += 1
                    print(f"WRONG {product} {order} {variant.text}: {error:.4f}", flush=True)
    print(f"odd sizes: {ran} checked, {wrong} wrong", flush=True)


def main() -> None:
    """As the module says."""
    from triton.backends import nvidia

    later = Path(nvidia.__file__).parent / "bin" / "ptxas-blackwell"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=150)
    parser.add_argument("--products", default=LOST)
    parser.add_argument("--ptxas", default=str(later) if later.exists() else "", help="a later one; empty: none")
    parser.add_argument("--odd", action="store_true")
    parser.add_argument("--refine", type=Path, help="FILE of an earlier run: its leaders, with constant N and K too")
    parser.add_argument("--add", default="", help="knobs, with commas: shipped winners with and without them")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tile_variants.py: needs a GPU")
    end, device = time.perf_counter() + arguments.limit_s, gpu_device(0)
    cases = {each: variants(each, device, arguments.ptxas) for each in arguments.products.replace(",", " ").split()}
    if arguments.add:
        cases = {each: adding(each, arguments.add.split(","), device) for each in cases}
        cases = {each: chosen for each, chosen in cases.items() if chosen}
    if arguments.refine:
        with arguments.refine.open(newline="") as stream:
            earlier = list(csv.DictReader(stream))
        cases = {each: refined(each, earlier, device, arguments.ptxas) for each in cases}
        cases = {each: chosen for each, chosen in cases.items() if chosen}
    odd = {each: [v for v in variants(each, device, "") if v.new] for each in ODD.split()} if arguments.odd else {}
    facts = compile_all({**cases, **odd}, device)
    good = {
        product: [
            v
            for v in chosen
            if not any(isinstance(facts[b, v.ptxas], str) for b in builds_of(spec_of(product, device), v.knobs, device))
        ]
        for product, chosen in {**cases, **odd}.items()
    }
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        check_odd({each: good[each] for each in odd}, device)
        print(f"{'product':16} {'order':6} {'old us':>8} {'new us':>8}  ratio  old | new", flush=True)
        for product in cases:
            if time.perf_counter() > end - 5:
                print(f"{arguments.limit_s:.0f} s are over")
                break
            done = measure(product, good[product], device)
            for order in ORDERS:
                print(line(product, order, done), flush=True)
            rows += rows_of(product, done, facts, device)
            with arguments.out.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
            del done
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
