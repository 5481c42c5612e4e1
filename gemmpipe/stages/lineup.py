"""The lineup stage of compare: who is timed side by side on each problem, and under which name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gemmpipe.backends.same_size import BLOCKWISE, SameSize
from gemmpipe.data import Build, Candidate, Scalar
from gemmpipe.errors import UserError
from gemmpipe.executors import Built, finishing
from gemmpipe.family import GemmSpec, Implementation
from gemmpipe.formats.engine_json import EngineJson
from gemmpipe.formats.sglang import Sglang
from gemmpipe.formats.vllm import Vllm
from gemmpipe.runtime.tables import load_tables
from gemmpipe.search.features import View, Vocabulary
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.incumbents import native_tables
from gemmpipe.stages.listing import Listing, list_candidates
from gemmpipe.stages.rows import problems_of, untimed_row
from gemmpipe.tables import store
from gemmpipe.tables.merging import Row
from gemmpipe.tables.recorded import Unusable, recorded_candidate

if TYPE_CHECKING:
    import pandas as pd

_WAIT_S = 0.5
TUNED, OWN, UNTUNED = "tuned", "tuned, own kernels", "untuned"

Key = tuple[tuple[str, Scalar], ...]
Entry = tuple[str, Candidate, str]
"""(name, candidate, role)."""


@dataclass(frozen=True, kw_only=True)
class Lineup(Stage):
    """The tuned winner, the best own kernel, the untuned choice, every library path, and engines' configurations.

    `vllm` and `sglang` are folders or files of these engines' JSON configurations, run on the kernel of their form;
    `own` is a table that was tuned without libraries, so that own kernels take part where a library was chosen.
    """

    vllm: tuple[str, ...]
    sglang: tuple[str, ...]
    own: str | None

    needs: ClassVar[tuple[str, ...]] = ("problems",)
    gives: ClassVar[tuple[str, ...]] = ("shortlist", "lineup")
    uses_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _files(self.vllm, "vllm"), _files(self.sglang, "sglang")
        _files([self.own] if self.own else [], "own")

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """A shortlist for bench, and `lineup`: problem, name, candidate, reason (where it takes no part)."""
        import pandas as pd

        from gemmpipe.table import SHORTLIST

        chosen, own = _chosen(context), _of(_rows([Path(self.own).expanduser()] if self.own else [], context), context)
        engines = [("vllm", _files(self.vllm, "vllm"), Vllm(device_name=None))]
        engines += [("sglang", _files(self.sglang, "sglang"), Sglang(device_name=None))]  # type: ignore[list-item]
        shortlist: dict[tuple[str, str], dict[str, object]] = {}
        named: list[dict[str, object]] = []
        builds: dict[str, Build] = {}
        for problem in problems_of(context.family, tables["problems"]):
            listing = list_candidates(
                problem, context.family, context.implementations, context.device, context.space, ()
            )
            row, alone = chosen.get(problem.key), own.get(problem.key)
            entries = [*_tuned(listing, row, alone, context), *_untuned(listing, context), *_others(listing, context)]
            entries += [e for name, files, form in engines for e in _engine(name, files, form, listing, context)]
            for name, candidate, role in entries:
                shortlist.setdefault((problem.id, candidate.id), untimed_row(problem.id, candidate, role))
                named.append({"problem": problem.id, "name": name, "candidate": candidate.id})
                builds |= {b.id: b for b in _builds(candidate, listing, context)}
        _compile(list(builds.values()), context)
        return {
            "shortlist": pd.DataFrame(list(shortlist.values()), columns=list(SHORTLIST)),
            "lineup": pd.DataFrame(named, columns=["problem", "name", "candidate"]),
        }


def _chosen(context: Context) -> dict[Key, Row]:
    """The rows of the run-time tables for this device, the output's own first; by problem key."""
    paths = native_tables(context.family, context.output, (form for _, form in context.formats))
    rows = _rows([path for path in paths if path.is_file()], context)
    rows += [found.row for alternatives in load_tables(context.family).rows.values() for found in alternatives]
    return _of(rows, context)


def _rows(paths: Sequence[Path], context: Context) -> list[Row]:
    return [row for path in paths for row in store.read(path, context.family)]


def _of(rows: Sequence[Row], context: Context) -> dict[Key, Row]:
    """The first row of each key on this device."""
    names = [c.name for c in context.family.key_columns]
    found: dict[Key, Row] = {}
    for row in rows:
        if (row["gfx"], row["cu_num"]) == (context.device.gfx, context.device.cu_num):
            found.setdefault(tuple((name, row[name]) for name in names), row)
    return found


def _tuned(listing: Listing, row: Row | None, alone: Row | None, context: Context) -> Iterator[Entry]:
    """What the tables choose, and the own kernels' best."""
    own = {i.label for i in context.family.implementations}
    winner = _winner(listing, row, context)
    if winner is not None:
        yield (TUNED, winner, "compared")
    best = _winner(listing, alone, context) or winner
    if best is not None and best.backend in own:
        yield (OWN, best, "compared")


def _winner(listing: Listing, row: Row | None, context: Context) -> Candidate | None:
    implementation = context.implementation(str(row.get("libtype"))) if row is not None else None
    if row is None or implementation is None:
        return None
    try:
        return recorded_candidate(implementation, row, listing.spec, context.device)
    except (Unusable, UserError):
        return None


def _untuned(listing: Listing, context: Context) -> Iterator[Entry]:
    """What would be taken without a table: the best own kernel by the analytic model."""
    own = {i.label for i in context.family.implementations}
    candidates = [c for c in listing.candidates if c.backend in own]
    if candidates:
        estimate = View(Vocabulary(), listing.spec, context.device, candidates, {}).look({}).estimate
        yield (UNTUNED, candidates[int(np.argmin(estimate))], "compared")


def _others(listing: Listing, context: Context) -> Iterator[Entry]:
    """Every candidate that is no kernel of ours: libraries, third parties, and products of the same size."""
    own = {i.label for i in context.family.implementations}
    for candidate in listing.candidates:
        if candidate.backend in own:
            continue
        words = " ".join(str(v) if isinstance(v, str) else f"{k}={v}" for k, v in candidate.items)
        unlike = candidate.backend == SameSize.label and candidate.knobs["method"] != BLOCKWISE
        yield (f"{candidate.backend} {words}".strip(), candidate, "unlike" if unlike else "compared")


def _files(paths: Sequence[str], key: str) -> list[Path]:
    found: list[Path] = []
    for text in paths:
        path = Path(text).expanduser()
        if not path.exists():
            raise UserError(f"stages.lineup.{key}: {path}: no such file or folder")
        found += sorted(path.glob("*.json")) if path.is_dir() else [path]
    return found


def _engine(name: str, files: Sequence[Path], form: EngineJson, listing: Listing, context: Context) -> Iterator[Entry]:
    """The configuration that the engine would take: the file of this N and K, the nearest M in it."""
    spec = listing.spec
    kernel = next((i for i in context.family.implementations if i.label == "triton"), None)
    path = next((p for p in files if p.name.startswith(f"N={spec.n},K={spec.k},")), None)
    if kernel is None or path is None:
        return
    configurations = form.read(path)
    m = min(configurations, key=lambda m: (abs(int(m) - spec.m), int(m)))
    knobs = {"NUM_KSPLIT": 1, "cache_modifier": "", **configurations[m]}
    candidate = Candidate.of("triton", kernel.normalise(spec, knobs, context.device))
    if kernel.misfit(spec, candidate.knobs, context.device) is None:
        yield (name, candidate, "compared")


def _builds(candidate: Candidate, listing: Listing, context: Context) -> tuple[Build, ...]:
    known = listing.builds.get(candidate.id)
    implementation: Implementation | None = context.implementation(candidate.backend)
    if known is not None or implementation is None:
        return known or ()
    spec: GemmSpec = listing.spec
    return implementation.builds(spec, candidate.knobs, context.device)


def _compile(builds: list[Build], context: Context) -> None:
    """Fill the cache side by side; what fails says so when it is launched."""
    for build in builds:
        context.pool.compile(build)
    left = len(builds)
    with finishing(context.pool, lambda message: None):
        while left:
            context.check()
            left -= sum(isinstance(message, Built) for message in context.pool.poll(_WAIT_S))
