"""The lineup stage of compare: who is timed side by side on each problem, and under which name."""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.data import Build, Problem, Scalar
from gemmpipe.errors import UserError
from gemmpipe.executors import Built, finishing
from gemmpipe.formats.engine_json import EngineJson
from gemmpipe.formats.sglang import Sglang
from gemmpipe.formats.vllm import Vllm
from gemmpipe.jobs.autotuning import AutotuneJob
from gemmpipe.runtime.tables import load_tables
from gemmpipe.stages import Context, Stage, autotuning, contenders
from gemmpipe.stages.contenders import Contender
from gemmpipe.stages.incumbents import native_tables
from gemmpipe.stages.listing import Listing, listing_task
from gemmpipe.stages.rows import problems_of, untimed_row
from gemmpipe.stopwatch import IDLE
from gemmpipe.tables import store
from gemmpipe.tables.merging import Row
from gemmpipe.tables.recorded import Unusable

if TYPE_CHECKING:
    import pandas as pd

_WAIT_S = 0.5
LINEUP = ("problem", "name", "candidate", "unlike", "reason", "run_id", "seconds", "tried", "of", "compiled")
"""The columns of `lineup`; the last four say what a choice took another tuner."""

Key = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, kw_only=True)
class Lineup(Stage):
    """The tuned winner, the best own kernel, the untuned choice, every library path, engines' and Triton's choices.

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

    def check(self, context: Context) -> None:
        """Raises UserError for a table of own kernels that has nothing for this device."""
        if self.own and not self._own(context):
            device = context.device
            raise UserError(
                f"stages.lineup.own: {self.own} has no row for {device.gfx}/{device.cu_num} ({device.name}), "
                "expected a table tuned here"
            )

    def _own(self, context: Context) -> dict[Key, list[Row]]:
        return _of(_rows([Path(self.own).expanduser()] if self.own else [], context), context)

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """A shortlist for bench, and `lineup`: who runs under which name, and why somebody takes no part."""
        import pandas as pd

        from gemmpipe.table import SHORTLIST

        listings = list(_listings(problems_of(context.family, tables["problems"]), context))
        journals = cache(partial(contenders.journal_of, context.run_dir.parent.parent))
        chosen, own = _chosen(context), self._own(context)
        found: dict[str, list[Contender]] = {}
        builds: dict[str, Build] = {}
        for listing in listings:
            key = listing.problem.key
            these = [*contenders.tuned(listing, chosen.get(key, ()), own.get(key, ()), journals, context)]
            these += [*contenders.untuned(listing, context), *contenders.others(listing, context)]
            for name, files, form in self._engines():
                these += contenders.engine(name, files, form, listing, context)
            found[listing.problem.id] = these
            builds |= {b.id: b for contender in these for b in _builds(contender, listing, context)}
        _compile(list(builds.values()), context)
        for problem, contender in _autotuned(listings, context):
            found[problem].append(contender)
        return {
            "shortlist": pd.DataFrame(_shortlist(found), columns=list(SHORTLIST)),
            "lineup": pd.DataFrame([_row(p, c) for p, these in found.items() for c in these], columns=list(LINEUP)),
        }

    def _engines(self) -> tuple[tuple[str, list[Path], EngineJson], ...]:
        return (
            (contenders.VLLM, _files(self.vllm, "vllm"), Vllm(device_name=None)),
            (contenders.SGLANG, _files(self.sglang, "sglang"), Sglang(device_name=None)),
        )


def _listings(problems: Sequence[Problem], context: Context) -> Iterator[Listing]:
    """Every problem's, made by idle compile processes where there are some."""
    tasks = [listing_task(problem, context, ()) for problem in problems]
    asides: list[Future[Listing] | None] = [context.pool.aside(task) for task in tasks]
    for task, future in zip(tasks, asides, strict=True):
        context.check()
        if future is None:
            yield task()
        else:
            with context.watch.spending(IDLE):
                listing = future.result()
            yield listing


def _chosen(context: Context) -> dict[Key, list[Row]]:
    """The rows of the run-time tables for this device, the output's own first; by problem key."""
    paths = native_tables(context.family, context.output, (form for _, form in context.formats))
    rows = _rows([path for path in paths if path.is_file()], context)
    rows += [found.row for alternatives in load_tables(context.family).rows.values() for found in alternatives]
    return _of(rows, context)


def _rows(paths: Sequence[Path], context: Context) -> list[Row]:
    return [row for path in paths for row in store.read(path, context.family)]


def _of(rows: Sequence[Row], context: Context) -> dict[Key, list[Row]]:
    """The rows of each key on this device, in this order."""
    names = [c.name for c in context.family.key_columns]
    found: dict[Key, list[Row]] = {}
    for row in rows:
        if (row["gfx"], row["cu_num"]) == (context.device.gfx, context.device.cu_num):
            found.setdefault(tuple((name, row[name]) for name in names), []).append(row)
    return found


def _files(paths: Sequence[str], key: str) -> list[Path]:
    found: list[Path] = []
    for text in paths:
        path = Path(text).expanduser()
        if not path.exists():
            raise UserError(f"stages.lineup.{key}: {path}: no such file or folder")
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"stages.lineup.{key}: {path}: no JSON file there")
        found += files
    return found


def _builds(contender: Contender, listing: Listing, context: Context) -> tuple[Build, ...]:
    """In every order of x's block scales; the listing names those of screening alone."""
    candidate = contender.candidate
    implementation = context.implementation(candidate.backend) if candidate is not None else None
    if candidate is None or implementation is None:
        return ()
    return implementation.builds(listing.spec, candidate.knobs, context.device)


def _compile(builds: list[Build], context: Context) -> None:
    """Fill the cache side by side; what fails says so when it is launched."""
    for build in builds:
        context.pool.compile(build)
    left = len(builds)
    with finishing(context.pool, lambda message: None):
        while left:
            context.check()
            left -= sum(isinstance(message, Built) for message in context.pool.poll(_WAIT_S))


def _autotuned(listings: Sequence[Listing], context: Context) -> Iterator[tuple[str, Contender]]:
    """What `triton.autotune` chooses on each problem, where it takes part; by problem id."""
    other = contenders.tuner(context)
    jobs = []
    for listing in listings if other is not None else ():
        problem = listing.problem
        try:
            configurations = contenders.given_to(other, listing, context)  # type: ignore[arg-type]
        except Unusable as error:
            yield problem.id, Contender(name=contenders.AUTOTUNE, reason=str(error))
            continue
        # In any order, so that a limit of time does not favour where the space begins.
        order = random.Random(problem.id).sample(configurations, len(configurations))
        jobs.append(AutotuneJob(stage=autotuning.STAGE, problem=problem, configurations=tuple(order)))
    for problem_id, trial in autotuning.autotuned(jobs, context).items() if jobs else ():
        yield problem_id, contenders.autotuned(trial)


def _shortlist(found: Mapping[str, Sequence[Contender]]) -> list[dict[str, object]]:
    """A row a candidate, under however many names."""
    rows: dict[tuple[str, str], dict[str, object]] = {}
    for problem, these in found.items():
        for one in these:
            if one.candidate is not None:
                role = "unlike" if one.unlike else "compared"
                rows.setdefault((problem, one.candidate.id), untimed_row(problem, one.candidate, role))
    return list(rows.values())


def _row(problem: str, one: Contender) -> dict[str, object]:
    candidate = one.candidate.id if one.candidate is not None else ""
    said = {"problem": problem, "name": one.name, "candidate": candidate, "unlike": one.unlike}
    said |= {"reason": one.reason, "run_id": one.run_id}
    return {**said, **(asdict(one.tuning) if one.tuning is not None else {})}
