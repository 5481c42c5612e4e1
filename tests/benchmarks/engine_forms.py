"""Engines' own Triton functions on this GPU: python tests/benchmarks/engine_forms.py all|agree|files ...

agree: our kernel of an engine's form against the engine's function, over random products and configurations: the
share within 3 % and the worst, for the exact form (of the finals) and for that of the screening. files FOLDER: the
engine's function with the files in FOLDER against its published file, or its default where there is none: geometric
mean and worst by regime of M, the geometric middles between keys included. all: agree for vLLM, for SGLang and for
vLLM's experts (engine_experts.py), one after the other within --limit-s, compiled ahead together; CSVs in --out.

All time in CUDA graphs, on cold weights in rotation, interleaved, and write a CSV. The engine must be importable;
`--without-library` defines the operators that vLLM asks for at import, for a vLLM without its compiled library.
"""

import argparse
import csv
import itertools
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton.runtime.jit import JITFunction

from gemmpipe.backends.engine import EngineBackend, EngineProduct
from gemmpipe.bench.gpu_clock import clock_for
from gemmpipe.bench.setup import WorkerBench
from gemmpipe.bench.timer import paired_ratio
from gemmpipe.core.data import Candidate, Device, Knobs, Problem, median
from gemmpipe.core.device import DeviceChoice
from gemmpipe.family import Family, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.formats.engine_json import EngineJson, Sglang, Vllm, nearest_key
from gemmpipe.launch.build import compile_kernel, read_code

FAMILY = "a8w8_blockscale"
FORMATS: Mapping[str, EngineJson] = {"vllm": Vllm(device_name=None), "sglang": Sglang(device_name=None)}
SIZES = (
    (2304, 7168), (7168, 2304), (4096, 512), (512, 7168), (1536, 7168), (7168, 16384), (24576, 1536), (32768, 512),
    (2112, 7168), (1280, 8192), (8192, 1024), (7168, 8192), (3000, 4224), (576, 7168),
)  # fmt: skip
MS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
REGIMES = ((1, 64), (65, 127), (128, 256), (257, 1023), (1024, 1 << 30))
LIMIT_PCT = 3.0
OPERATORS = ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Candidates (label, knobs) of one product, side by side; the last one is what the others are compared with."""

    m: int
    n: int
    k: int
    contenders: tuple[Candidate, ...]


@dataclass(frozen=True, kw_only=True)
class Race:
    """The times of a case."""

    samples: list[list[float]]
    """Of each contender, one a round, us."""
    apart: float
    """How far the first's result is from the last's, over its norm."""
    same_code: bool
    """True if the first is ours and runs kernels of the same instructions as the last, which is the engine's."""


class Stand:
    """The kernels that a process times: `real` is the engine's function, `exact` and `own` are our kernel of its form.

    `exact` is what the finals time where there is no engine, `own` what screening times.
    """

    def __init__(self, engine: str) -> None:
        self.family: Family = load_family(FAMILY)
        self.device: Device = DeviceChoice(kind="auto", index=None, shared=False).find()[0]
        (found,) = EngineBackend(engine=engine).implementations(self.family)
        if reason := found.unavailable_reason():
            raise SystemExit(f"engine_forms: {reason}")
        assert isinstance(found, EngineProduct)
        self.product, self.clock = found, clock_for(self.device)
        forms = {"own": found.kernel, "exact": found.exact_form().kernel, "real": found.finals_implementation()}
        self.bench = WorkerBench(self.family, forms, self.device)

    def problem(self, case: Case) -> Problem:
        """The product of a case."""
        defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
        key = {"M": case.m, "N": case.n, "K": case.k}
        return make_problem(self.family, key, defaults, self.device.gfx, "case")

    def fits(self, m: int, n: int, k: int, knobs: Knobs) -> bool:
        """True if a configuration of the form can run."""
        case = Case(m=m, n=n, k=k, contenders=())
        return self.product.unsupported_reason(self.family.spec(self.problem(case)), knobs, self.device) is None

    def once(self, case: Case) -> None:
        """Launch each once: what they have to have compiled is in Triton's disk cache then."""
        setup = self.bench.set_up(self.problem(case))
        for candidate in case.contenders:
            setup.bind(candidate, 0)()
        self.clock.synchronize()

    def race(self, case: Case, rounds: int) -> Race:
        """A spacer runs before each launch: launches back to back overlap in another way than among other kernels."""
        setup, clock = self.bench.set_up(self.problem(case)), self.clock
        # An engine's function allocates its output, in a graph at one address for all launches: in the cache. So it is
        # for ours here; outputs in rotation would cost a short product up to 8 % for memory that they write.
        out = setup.out(0)
        setup.out = lambda index: out  # type: ignore[method-assign]
        launches = [setup.bind(candidate, 0) for candidate in case.contenders]
        a = launches[0]().float().clone()
        with recorded_kernels() as kernels:
            b = launches[-1]().float().clone()
        apart = float((a - b).norm() / b.norm())
        count = clock.launches_per_sample(min(clock.sequence(launches * 3)), setup.sets)
        replays = [clock.replay_of([setup.bind(c, i) for i in range(count)], separate=True) for c in case.contenders]
        for _ in range(5):
            for replay in replays:
                replay()
        samples: list[list[float]] = [[] for _ in replays]
        for turn in range(rounds):
            for i in range(len(replays)) if turn % 2 else reversed(range(len(replays))):
                samples[i].append(replays[i]())
        ours = case.contenders[0].backend == "exact"
        same_code = ours and self.code(case) == [code_of(kernel) for kernel in kernels]
        return Race(samples=samples, apart=apart, same_code=same_code)

    def code(self, case: Case) -> list[bytes]:
        """The instructions of the first contender's kernels."""
        first, spec = case.contenders[0], self.family.spec(self.problem(case))
        builds = self.bench.implementation(first).builds(spec, first.knobs, self.device)
        return [code_of(compile_kernel(build, self.device)) for build in builds]


def code_of(kernel: Any) -> bytes:
    """The instructions of a compiled kernel of Triton's."""
    return read_code(kernel.asm["cubin"])


@contextmanager
def recorded_kernels() -> Iterator[list[Any]]:
    """The compiled kernels that JIT functions launch within the block, in order."""
    run, found = JITFunction.run, []

    def recording_run(function: Any, *args: Any, **arguments: Any) -> Any:
        found.append(run(function, *args, **arguments))
        return found[-1]

    JITFunction.run = recording_run
    try:
        yield found
    finally:
        JITFunction.run = run


def random_cases(stand: Stand, count: int, configurations: int, seed: int) -> list[Case]:
    """Random products, each with one of so many random configurations; Ms that are 1, odd and multiples of 16."""
    draw = random.Random(seed)
    grid = [
        {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": g, "num_warps": w, "num_stages": s}
        for m in (16, 32, 64, 128, 256) for n in (32, 64, 128, 256) for k in (64, 128)
        for g in (1, 16, 32, 64) for w in (4, 8) for s in (2, 3, 4, 5)
    ]  # fmt: skip
    chosen = draw.sample([knobs for knobs in grid if stand.fits(64, 512, 1024, knobs)], configurations)
    swapped = [
        {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": s,
         "SWAP_AB": True, "SPLIT_K": splits}
        for m in (16, 32, 64) for n in (64, 128) for k in (64, 128) for s in (3, 4, 5) for splits in (1, 4, 16)
    ]  # fmt: skip
    swapped = [knobs for knobs in swapped if stand.fits(64, 512, 1024, knobs)]  # by SGLang's kernel alone
    chosen += draw.sample(swapped, min(len(swapped), configurations // 6))
    cases = []
    while len(cases) < count:
        (n, k), m, knobs = draw.choice(SIZES), draw.choice((*MS, 3, 11, 39, 181, 724, 2896)), draw.choice(chosen)
        tiles = -(-m // knobs["BLOCK_SIZE_M"]) * -(-n // knobs["BLOCK_SIZE_N"])
        if tiles <= 20_000 and knobs["BLOCK_SIZE_M"] <= max(64, 2 * m) and (m <= 256 or "SPLIT_K" not in knobs):
            forms = tuple(Candidate.of(label, knobs) for label in ("exact", "own", "real"))
            cases.append(Case(m=m, n=n, k=k, contenders=forms))
    return cases


def file_cases(
    stand: Stand, form: EngineJson, ours: Path, published: Sequence[Path], sizes: Iterable[tuple[int, int]]
) -> list[Case]:
    """Each product and M: our entry against what the engine takes without the file."""
    between = {round(math.sqrt(a * b)) for a, b in itertools.pairwise(MS)}
    cases = []
    for n, k in sizes:
        for m in sorted({*MS, *between}):
            case = Case(m=m, n=n, k=k, contenders=())
            spec = stand.family.spec(stand.problem(case))
            entries, theirs = (form.entries(spec, stand.device, paths) for paths in ([ours], published))
            if not entries:
                print(f"N={n} K={k}: no {form.file_name(spec, stand.device.name)} in {ours}", flush=True)
                break
            before = theirs[nearest_key(theirs, m)] if theirs else stand.product.default(spec, stand.device)
            now = entries[nearest_key(entries, m)]
            both = (Candidate.of("real", now), Candidate.of("real", before or {}))
            cases.append(Case(m=m, n=n, k=k, contenders=both))
    return cases


def compile_ahead(commands: Sequence[Sequence[str]], limit_s: float) -> None:
    """Processes that launch each a share of the cases once, so that everything is in Triton's disk cache."""
    begun = time.monotonic()
    these = [subprocess.Popen([sys.executable, *arguments]) for arguments in commands]
    for process in these:
        try:
            process.wait(timeout=max(1.0, limit_s - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"compiled ahead in {time.monotonic() - begun:.1f} s", flush=True)


def shares(command: Sequence[str], processes: int) -> list[list[str]]:
    """The command of each process that compiles ahead."""
    return [[*command, "--share", f"{i}/{processes}"] for i in range(processes)]


def results(
    stand: Stand, cases: Sequence[Case], arguments: argparse.Namespace, begun: float
) -> Iterator[dict[str, object]]:
    """A row a case, until the time is over; `ratio` is the first's time over the last's."""
    for case in cases:
        if time.monotonic() - begun > arguments.limit_s:
            print(f"stopped after {arguments.limit_s:g} s", flush=True)
            return
        row: dict[str, object] = {"M": case.m, "N": case.n, "K": case.k}
        first, *others, last = case.contenders
        same = first == last
        try:
            race = (
                Race(samples=[[1.0], [1.0]], apart=0.0, same_code=True) if same else stand.race(case, arguments.rounds)
            )
        except Exception as error:  # noqa: BLE001 - whatever a kernel or an engine raises is a row
            print(f"{row}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        samples = race.samples
        row |= {"us": round(median(samples[0]), 3), "other_us": round(median(samples[-1]), 3)}
        row |= {
            "ratio": round(paired_ratio(samples[0], samples[-1]).median, 4),
            "same": same,
            "apart": f"{race.apart:.1e}",
        }
        row["same_code"] = race.same_code
        for candidate, own in zip(others, samples[1:], strict=False):
            row[f"{candidate.backend}_ratio"] = round(paired_ratio(own, samples[-1]).median, 4)
        yield row | {"config": dict(first.items), "other_config": dict(last.items)}


def tell_agreement(rows: Sequence[Mapping[str, object]]) -> None:
    """The share of cases within LIMIT_PCT and the worst, for the exact form and the screening's."""
    print(f"{sum(bool(row['same_code']) for row in rows)} of {len(rows)} cases: exact form and engine run equal code")
    for form, column in (("exact", "ratio"), ("screening's", "own_ratio")):
        ratios = [float(str(row[column])) for row in rows]
        within = sum(abs(ratio - 1) <= LIMIT_PCT / 100 for ratio in ratios) / len(ratios)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{len(rows)} cases, {form} form: {within:.1%} within {LIMIT_PCT:g} %, own / engine {mean:.4f} "
              f"({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip
        off = sorted(rows, key=lambda row: abs(math.log(float(str(row[column])))))
        for row in off[-4:]:
            print("  ", {name: value for name, value in row.items() if name != "other_config"})


def tell_files(rows: Sequence[Mapping[str, object]]) -> None:
    """Ours over what the engine takes without the file, by regime."""
    for low, high in REGIMES:
        these = [row for row in rows if low <= int(str(row["M"])) <= high]
        if these:
            ratios = [float(str(row["ratio"])) for row in these]
            worst = max(these, key=lambda row: float(str(row["ratio"])))
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"M {low}..{high if high < 1 << 30 else ''}: {len(these)} cases, geometric mean {mean:.3f}, worst "
                  f"{max(ratios):.3f} (M={worst['M']} N={worst['N']} K={worst['K']})")  # fmt: skip


def define_operators() -> None:
    """Operators that vLLM asks at import whether this GPU has kernels of its library: none."""
    import torch

    library = torch.library.Library("_C", "FRAGMENT")
    for name in OPERATORS:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeImplicitAutograd")
    define_operators.kept = library  # type: ignore[attr-defined]


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("all", "agree", "files"))
    parser.add_argument("folder", type=Path, nargs="?", help="files: the engine's folder below output=")
    parser.add_argument("--engine", choices=tuple(FORMATS), default="vllm")
    parser.add_argument("--published", type=Path, nargs="*", help="files or folders; default: the engine's own")
    parser.add_argument("--sizes", nargs="*", help="NxK ...; default: those of the files, or a list for agree")
    parser.add_argument("--cases", type=int, default=120)
    parser.add_argument("--configurations", type=int, default=54)
    parser.add_argument("--experts", type=int, default=48, help="all: configurations of vLLM's experts")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=95.0, help="of the whole command")
    parser.add_argument("--processes", type=int, default=15, help="that compile ahead; 0: none")
    parser.add_argument("--without-library", action="store_true")
    parser.add_argument("--out", type=Path, help="the CSV; all: a folder. Default: here")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def sizes_of(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """The (N, K) that were named, or those of the files."""
    if arguments.sizes:
        return [(int(n), int(k)) for n, _, k in (size.partition("x") for size in arguments.sizes)]
    found = sorted(arguments.folder.glob("N=*,K=*,device_name=*.json")) if arguments.folder else []
    return [tuple(int(part[2:]) for part in path.name.split(",")[:2]) for path in found]  # type: ignore[misc]


def all_parts(arguments: argparse.Namespace) -> None:
    """Compile for all three parts together, then run one after the other in what is left of the time."""
    begun, own = time.monotonic(), str(Path(__file__))
    folder = arguments.out or Path()
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [
        "--cases",
        str(arguments.cases),
        "--configurations",
        str(arguments.configurations),
        "--seed",
        str(arguments.seed),
    ]
    stubs = ["--without-library"] if arguments.without_library else []
    parts: dict[str, list[str]] = {
        engine: [own, "agree", "--engine", engine, *sizes, *stubs, "--rounds", str(arguments.rounds)]
        for engine in FORMATS
    }
    if arguments.experts:
        parts["experts"] = [
            str(Path(__file__).with_name("engine_experts.py")),
            "agree",
            "--cases",
            str(arguments.experts),
        ]
    commands = [one for part in parts.values() for one in shares(part, max(1, arguments.processes // len(parts)))]
    compile_ahead(commands, arguments.limit_s / 2)
    for i, (name, part) in enumerate(parts.items()):
        left_s = (arguments.limit_s - (time.monotonic() - begun)) / (len(parts) - i)
        print(f"== {name}", flush=True)
        out = folder / f"agree_{name}.csv"
        run = [*part, "--processes", "0", "--limit-s", f"{left_s - 2:.0f}", "--out", str(out)]
        try:
            subprocess.run([sys.executable, *run], timeout=left_s + 5, check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}: ended after {left_s + 5:.0f} s", flush=True)
    print(f"{time.monotonic() - begun:.1f} s in all")


def cases_of(stand: Stand, arguments: argparse.Namespace) -> list[Case]:
    """Those of the mode."""
    if arguments.mode == "agree":
        return random_cases(stand, arguments.cases, arguments.configurations, arguments.seed)
    published = arguments.published or list(stand.product.folders())
    return file_cases(stand, FORMATS[arguments.engine], arguments.folder, published, sizes_of(arguments))


def launch_share(stand: Stand, cases: Sequence[Case], share: str) -> None:
    """Launch each of this process's cases once."""
    part, _, parts = share.partition("/")
    for case in cases[int(part) :: int(parts)]:
        try:
            stand.once(case)
        except Exception as error:  # noqa: BLE001 - it is told where it is timed
            print(f"ahead: {type(error).__name__}", flush=True)


def main(argv: Sequence[str]) -> None:
    """Run a mode; or, in a process that compiles ahead, its share of the cases."""
    begun, arguments = time.monotonic(), parsed(argv)
    if arguments.mode == "all":
        all_parts(arguments)
        return
    if arguments.without_library:
        define_operators()
    if arguments.mode == "files" and arguments.folder is None:
        raise SystemExit("engine_forms: files needs the folder of the files")
    if not arguments.share and arguments.processes:
        compile_ahead(shares([__file__, *argv], arguments.processes), arguments.limit_s / 2)
    stand = Stand(arguments.engine)
    cases = cases_of(stand, arguments)
    if arguments.share:
        launch_share(stand, cases, arguments.share)
        return
    rows = list(results(stand, cases, arguments, begun))
    if not rows:
        raise SystemExit("engine_forms: nothing was timed")
    out = arguments.out or Path("engine_forms.csv")
    with out.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (tell_agreement if arguments.mode == "agree" else tell_files)(rows)
    print(f"{out}, {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
