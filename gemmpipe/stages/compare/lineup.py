"""The lineup stage of compare: the named entries that are timed together on each problem.

`triton.autotune` chooses its entry on the workers, one problem after the other.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.bench.jobs import AutotuneJob, Job
from gemmpipe.core.data import Build, Trial
from gemmpipe.core.errors import UserError
from gemmpipe.core.events import IDLE
from gemmpipe.executors import BuildResult, JobResult, drain_on_interrupt
from gemmpipe.formats.engine_json import EngineJson, Sglang, Vllm
from gemmpipe.stages import POLL_S, Context, Stage
from gemmpipe.stages.compare import entries
from gemmpipe.stages.compare.ahead import compile_entries
from gemmpipe.stages.compare.chosen import TunedRows, chosen_rows, table_rows
from gemmpipe.stages.compare.entries import LineupEntry
from gemmpipe.stages.dispatch import dispatch_jobs
from gemmpipe.stages.first_launches import first_launches
from gemmpipe.stages.needed_builds import finals_form
from gemmpipe.stages.rows import untimed_row
from gemmpipe.stages.screen.candidates import CandidateList, listing_task
from gemmpipe.tables.recorded import UnusableRow

if TYPE_CHECKING:
    import pandas as pd


STAGE = "autotune"


def run_autotune(jobs: Sequence[AutotuneJob], context: Context) -> dict[str, Trial]:
    """By problem id: its choice, or its failure. Problems of an earlier session of the run are not tuned again."""
    found = {job.problem.id: t for job in jobs for t in context.record.of(STAGE, job.problem.id)}
    queue: list[Job] = [job for job in jobs if job.problem.id not in found]
    open_ = {job.problem.id for job in queue}

    def receive(message: BuildResult | JobResult) -> None:
        if isinstance(message, BuildResult) or message.job.stage != STAGE:
            return
        for trial in message.trials:
            context.journal.trial(trial)
            found[trial.problem] = trial
        if message.complete:
            open_.discard(message.job.problem.id)

    context.events.emit("stage", STAGE, total=len(open_), unit="problems")
    total = len(open_)
    with drain_on_interrupt(context.pool, receive):
        while open_:
            dispatch_jobs(queue, context)
            for message in context.pool.poll(POLL_S):
                receive(message)
            context.check()
            context.events.emit("progress", done=total - len(open_))
    return found


LINEUP = (
    *("problem", "name", "candidate", "unlike", "reason", "run_id", "condition"),
    *("seconds", "tried", "of", "compiled"),
)
"""The columns of `lineup`; the last four are the cost of another tuner's choice."""


@dataclass(frozen=True, kw_only=True)
class Lineup(Stage):
    """The tuned winner, the best own kernel, the untuned choice, every library path, engines' and Triton's choices.

    `vllm` and `sglang`: folders or files of these engines' JSON configurations, which run on the kernel of their form.
    `own`: a table tuned without libraries, for an own kernel where a library was chosen.
    """

    vllm: tuple[str, ...]
    sglang: tuple[str, ...]
    own: str | None

    needs: ClassVar[tuple[str, ...]] = ("problems",)
    gives: ClassVar[tuple[str, ...]] = ("shortlist", "lineup")
    uses_device: ClassVar[bool] = True
    is_comparison: ClassVar[bool] = True
    begins_cpu_budget: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _files(self.vllm, "vllm"), _files(self.sglang, "sglang")
        _files([self.own] if self.own else [], "own")

    def check(self, context: Context) -> None:
        """Raises UserError for a table of own kernels without a row for this device."""
        if self.own and not self._own_rows(context).exact:
            device = context.device
            raise UserError(
                f"stages.lineup.own: {self.own} has no row for {device.gfx}/{device.cu_num} ({device.name}), "
                "expected a table tuned here"
            )

    def _own_rows(self, context: Context) -> TunedRows:
        none = TunedRows(device=context.device, exact={})
        return table_rows(Path(self.own).expanduser(), context) if self.own else none

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns a shortlist for bench, and `lineup`: the entries by name, and the reasons for excluded ones."""
        import pandas as pd

        from gemmpipe.core.schema import SHORTLIST

        listings = list(_listings(context))
        journals = cache(partial(entries.journal_of, context.run_dir.parent.parent))
        chosen, own = chosen_rows(context), self._own_rows(context)
        found: dict[str, list[LineupEntry]] = {}
        builds: dict[str, Build] = {}
        for listing in listings:
            rows, rows_of_own = chosen.find(listing.problem), own.find(listing.problem)
            these = [*entries.tuned_entries(listing, rows, rows_of_own, journals, context)]
            these += [*entries.untuned_entry(listing, context), *entries.other_entries(listing, context)]
            for name, files, engine_format in self._engine_files():
                these += entries.engine_entries(name, files, engine_format, listing, context)
            found[listing.problem.id] = these
            builds |= {b.id: b for entry in these for b in _builds(entry, listing, context)}
        _check_names(found, context)
        candidates = {each.problem: [e.candidate for e in found[each.problem.id] if e.candidate] for each in listings}
        compile_entries(list(builds.values()), candidates, _more_finals_s(found, context), context)
        for problem, entry in _autotune_entries(listings, context):
            found[problem].append(entry)
        return {
            "shortlist": pd.DataFrame(_shortlist(found), columns=list(SHORTLIST)),
            "lineup": pd.DataFrame([_row(p, c) for p, these in found.items() for c in these], columns=list(LINEUP)),
        }

    def _engine_files(self) -> tuple[tuple[str, list[Path], EngineJson], ...]:
        return (
            (entries.VLLM, _files(self.vllm, "vllm"), Vllm(device_name=None)),
            (entries.SGLANG, _files(self.sglang, "sglang"), Sglang(device_name=None)),
        )


def _listings(context: Context) -> Iterator[CandidateList]:
    """The candidates of every problem, listed by compile processes where there are some.

    Where `cpu_budget_s` limits the run, the last ones are left out as soon as the time for it is over.
    """
    budget = context.cpu_budget
    if budget is not None:
        budget.begin_screening()
        context.events.emit("progress", "listing configurations", most_s=budget.end_s)
    tasks = [listing_task(problem, context, ()) for problem in context.problems]
    futures: list[Future[CandidateList] | None] = [context.pool.submit_task(task) for task in tasks]
    for place, (task, future) in enumerate(zip(tasks, futures, strict=True)):
        context.check()
        if place and budget is not None and time.monotonic() > budget.screening_ends_at:
            budget.left.update(problem.id for problem in context.problems[place:])
            return
        if future is None:
            yield task()
        else:
            with context.time_account.timed(IDLE):
                listing = future.result()
            yield listing


def _check_names(found: Mapping[str, Sequence[LineupEntry]], context: Context) -> None:
    """Raises UserError for a name in a later stage's options that no entry has."""
    names = {entry.name for these in found.values() for entry in these}
    for check in context.entry_checks:
        check(names, found.keys())


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


def _builds(entry: LineupEntry, listing: CandidateList, context: Context) -> tuple[Build, ...]:
    """The builds for every order of x's block scales; the listing has those of screening alone."""
    candidate = entry.candidate
    implementation = context.implementation(candidate.backend) if candidate is not None else None
    if candidate is None or implementation is None:
        return ()
    return finals_form(implementation).builds(listing.spec, candidate.knobs, context.device)


def _more_finals_s(found: Mapping[str, Sequence[LineupEntry]], context: Context) -> float:
    """How much longer the finals take than the step has said, now that their entries are known."""
    if context.finals_s is None:
        return 0.0
    timed = {name: [entry.candidate for entry in these if entry.candidate] for name, these in found.items()}
    launches = first_launches({p: timed[p.id] for p in context.problems if p.id in timed}, context)
    finals_s = context.finals_s({}, round(sum(map(len, timed.values())) / max(1, len(found))))
    return finals_s + sum(launch.seconds for launch in launches.values()) / context.device_count


def _autotune_entries(listings: Sequence[CandidateList], context: Context) -> Iterator[tuple[str, LineupEntry]]:
    """Yields (problem id, entry) of `triton.autotune`, where it is configured."""
    other = entries.autotune_backend(context)
    jobs = []
    for listing in listings if other is not None else ():
        problem = listing.problem
        try:
            configurations = entries.autotune_configs(other, listing, context)  # type: ignore[arg-type]
        except UnusableRow as error:
            yield problem.id, LineupEntry(name=entries.AUTOTUNE, reason=str(error))
            continue
        # Shuffled, so that a time limit does not favour the start of the space.
        order = random.Random(problem.id).sample(configurations, len(configurations))
        jobs.append(AutotuneJob(stage=STAGE, problem=problem, configurations=tuple(order)))
    for problem_id, trial in run_autotune(jobs, context).items() if jobs else ():
        yield problem_id, entries.autotune_entry(trial)


def _shortlist(found: Mapping[str, Sequence[LineupEntry]]) -> list[dict[str, object]]:
    """A row per candidate, also if it has several names."""
    rows: dict[tuple[str, str], dict[str, object]] = {}
    for problem, these in found.items():
        for entry in these:
            if entry.candidate is not None:
                role = "unlike" if entry.unlike else "compared"
                rows.setdefault((problem, entry.candidate.id), untimed_row(problem, entry.candidate, role))
    return list(rows.values())


def _row(problem: str, entry: LineupEntry) -> dict[str, object]:
    candidate = entry.candidate.id if entry.candidate is not None else ""
    cells = {"problem": problem, "name": entry.name, "candidate": candidate, "unlike": entry.unlike}
    cells |= {"reason": entry.reason, "run_id": entry.run_id, "condition": entry.condition}
    return {**cells, **(asdict(entry.tuning) if entry.tuning is not None else {})}
