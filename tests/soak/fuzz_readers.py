"""Every reader of files that others made, with files to begin from and the mutations that suit them."""

import gzip
import lzma
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import fuzz_seeds as seeds
from fuzz_mutations import Mutation, bytewise, cellwise, linewise, linewise_values, valuewise, wordwise
from search_setup import HOPPER

from gemmpipe import journal
from gemmpipe.cli.recipes import read_recipe
from gemmpipe.cli.runs import find_run
from gemmpipe.core.artifact import read_runs
from gemmpipe.core.data import is_plausible_time_us
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.formats.engine_json import Sglang, Vllm
from gemmpipe.formats.triton_json import read_buckets
from gemmpipe.report.run_folder import can_resume
from gemmpipe.runtime.capture.recorder import check_capture_file
from gemmpipe.search import recorded
from gemmpipe.sources.model.source import ModelShapes
from gemmpipe.sources.profile import TraceShapes
from gemmpipe.sources.records import LogShapes, TunableopShapes
from gemmpipe.sources.table import CsvShapes
from gemmpipe.stages.rows import recorded_finals
from gemmpipe.tables.merge import RowPreference
from gemmpipe.tables.store import load, parse_table, render
from gemmpipe.tables.tunableop import is_results, read_results, tuned_gfx
from gemmpipe.tables.unite import entries_of, unite_tables

NOTHING = KernelDefaults(dtype=None, out_dtype=None, bias=None)
GROUPS = frozenset(("kernel", "shapes", "search", "format", "space", "executor", "backend"))
LINES: tuple[Mutation, ...] = (bytewise, linewise, wordwise)
CELLS: tuple[Mutation, ...] = (*LINES, cellwise, cellwise)
TREES: tuple[Mutation, ...] = (bytewise, wordwise, valuewise, valuewise, valuewise)
ROWS: tuple[Mutation, ...] = (*LINES, linewise_values, linewise_values)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A reader of files; `read` takes its path, and raises AssertionError for input that it must refuse."""

    name: str
    file: str
    """The file's name in a folder of its own."""
    seeds: tuple[bytes, ...]
    mutations: tuple[Mutation, ...]
    read: Callable[[Path], object]
    pack: Callable[[bytes], bytes] = bytes
    """From the text to what stands in the file; mutated itself once in eight times, where it packs."""

    def input(self, rng: random.Random) -> bytes:
        """One input, by this random state."""
        raw = rng.choice(self.seeds)
        for _ in range(rng.choice((1, 1, 2, 3))):
            raw = rng.choice(self.mutations)(raw, rng)
        packed = self.pack(raw)
        return bytewise(packed, rng) if self.pack is not bytes and rng.random() < 0.125 else packed


def native(path: Path) -> None:
    """Read a table, unite it with itself, and read again what is written."""
    family = load_family("a16w16")
    sheet = parse_table(path, family)
    load(path, family)
    union = unite_tables(
        entries_of(path, family, sheet, {}), family, RowPreference(device=None, is_stale=lambda row: False)
    )
    for entry in union.entries:
        us = entry.row.get("us")
        assert us is None or us in (0, -1) or (isinstance(us, float) and us >= 0), us
    extra = sorted({name for entry in union.entries for name in entry.extra})
    path.write_text(render([{**e.row, **e.extra} for e in union.entries], family, extra), newline="")
    again = parse_table(path, family)
    assert [row.get("us") for row in again.rows] == [entry.row.get("us") for entry in union.entries]


def tuned_by_aiter(path: Path) -> None:
    """A table of aiter's, of two families."""
    for name in ("a8w8_blockscale", "a8w8"):
        rows = load(path, load_family(name)).rows
        assert all(is_plausible_time_us(row["us"]) for row in rows)


def shapes(path: Path) -> None:
    """Problems of a table."""
    for problem in CsvShapes(path=str(path), rows_of=None).problems(load_family("a16w16"), NOTHING, "sm_90"):
        assert 0 < problem.weight < 1e18


def captured(path: Path) -> None:
    """Captured products, as a source and as the file that is added to."""
    check_capture_file(path)
    shapes(path)


def model(path: Path) -> None:
    """A config.json for a plain and a grouped family, and for what its quantization says."""
    for family, quantization in (("a16w16", "ignore"), ("a8w8_blockscale", "config"), ("fmoe", "ignore")):
        source = ModelShapes(path=str(path), config=None, tp=2, ep=1, nsets=[1, 16], quantization=quantization)  # type: ignore[arg-type]
        loaded = load_family(family)
        for problem in _unless_none(lambda s=source, f=loaded: s.problems(f, NOTHING, "sm_90")):  # type: ignore[misc]
            sizes = [value for _, value in problem.key if isinstance(value, int)]
            assert all(0 <= size < 2**31 for size in sizes), problem
        _unless_none(lambda s=source, f=loaded: s.left_out(f, NOTHING, "sm_90"))  # type: ignore[misc]


def _unless_none(act: Callable[[], Sequence[object]]) -> Sequence[object]:
    """The result of a reader; empty for a file without content for it."""
    from gemmpipe.core.errors import UserError

    try:
        return act()
    except UserError as error:
        if "no experts in this model" in str(error) or "no products for kernel=" in str(error):
            return ()
        raise


def trace(path: Path) -> None:
    """A trace as problems, with their times."""
    source = TraceShapes(path=str(path), nsets=[1, 4], rows_of=None)
    source.problems(load_family("a16w16"), NOTHING, "sm_90")
    source.recorded_us(load_family("a16w16"), NOTHING, "sm_90")


def log(path: Path) -> None:
    """A server's log for three families."""
    for family in ("a8w8_blockscale", "a16w16", "fmoe"):
        source = LogShapes(path=str(path), rows_of=None, nsets="log", model_dim=7168, topk=8)
        source.problems(load_family(family), NOTHING, "gfx942" if family == "fmoe" else "sm_90")


def results_of_tunableop(path: Path) -> None:
    """Results of TunableOp as rows, and as problems."""
    is_results(path)
    tuned_gfx(path)
    read_results(path, load_family("a16w16"), replace(HOPPER, gfx="gfx942", cu_num=304))
    untuned_by_tunableop(path)


def untuned_by_tunableop(path: Path) -> None:
    """Records of TunableOp, as problems."""
    TunableopShapes(path=str(path), rows_of=None).problems(load_family("a16w16"), NOTHING, "sm_90")


def run(path: Path) -> None:
    """The journal of a run, and the problems and trials that `reuse=` takes from it."""
    recorded_finals(load_family("a16w16"), journal.read(path.parent))


def hydra(path: Path) -> None:
    """The arguments of a run."""
    (path.parent.parent / "trials.jsonl").write_text("{}\n{}\n")
    arguments = "hydra: {job: {config_name: tune}, runtime: {config_sources: []}}\n"
    path.with_name("hydra.yaml").write_text(arguments)
    find_run("resume", str(path.parent.parent), None, False)


def _reader(
    name: str, file: str, mutations: tuple[Mutation, ...], read: Callable[[Path], object], *raw: bytes
) -> Reader:
    return Reader(name=name, file=file, seeds=raw, mutations=mutations, read=read)


_ENGINE = "N=1280,K=8192,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
READERS = (
    _reader("native table", "t.csv", CELLS, native, seeds.NATIVE),
    _reader("aiter CSV", "t.csv", CELLS, tuned_by_aiter, seeds.AITER),
    _reader("aiter CSV of experts", "t.csv", CELLS, lambda p: load(p, load_family("fmoe")), seeds.AITER_FMOE),
    _reader("untuned CSV", "s.csv", CELLS, shapes, seeds.UNTUNED),
    _reader("captured CSV", "c.csv", CELLS, captured, seeds.CAPTURED),
    _reader("engine JSON: vllm", _ENGINE, TREES, lambda p: Vllm(device_name=None).read(p), seeds.ENGINE),
    _reader("engine JSON: sglang", _ENGINE, TREES, lambda p: Sglang(device_name=None).read(p), seeds.ENGINE),
    _reader("engine JSON: triton_json", "x.json", TREES, read_buckets, seeds.TRITON),
    _reader("config.json", "config.json", TREES, model, seeds.DENSE, seeds.SPARSE, seeds.HYBRID),
    _reader("profiler trace", "trace.json", TREES, trace, seeds.TRACE),
    Reader(
        name="profiler trace, packed",
        file="trace.json.gz",
        seeds=(seeds.TRACE,),
        mutations=TREES,
        read=trace,
        pack=lambda raw: gzip.compress(raw, 1, mtime=0),
    ),
    _reader("server log", "server.log", LINES, log, seeds.LOG),
    _reader("TunableOp results", "r.csv", CELLS, results_of_tunableop, seeds.TUNABLEOP),
    _reader("TunableOp untuned", "r.csv", CELLS, untuned_by_tunableop, seeds.TUNABLEOP_UNTUNED),
    _reader("journal", "trials.jsonl", ROWS, run, seeds.JOURNAL),
    _reader("manifest", "manifest.json", TREES, lambda p: can_resume(p.parent), seeds.MANIFEST),
    _reader("sidecar", "t.csv.meta.json", TREES, read_runs, seeds.SIDECAR),
    _reader("recipe", "r.yaml", LINES, lambda p: read_recipe(p, GROUPS), seeds.RECIPE),
    _reader("overrides of a run", "run/.hydra/overrides.yaml", LINES, hydra, seeds.HYDRA),
    Reader(
        name="recording",
        file="h200_a16w16.jsonl.xz",
        seeds=(seeds.RECORDING,),
        mutations=ROWS,
        read=recorded.read,
        pack=lambda raw: lzma.compress(raw, preset=0),
    ),
    _reader("recording CSV", "h200_a16w16.csv", CELLS, recorded.read, seeds.RECORDING_CSV),
)
