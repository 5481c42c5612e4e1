"""Runs a plan: checks the chain, sends problems through it in batches, and leaves a manifest."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe import journal as journals
from gemmpipe import manifest, report
from gemmpipe.backends import Backend
from gemmpipe.data import Device, Problem
from gemmpipe.device import NO_DEVICE, DeviceChoice, versions
from gemmpipe.errors import EnvironmentProblem, UserError
from gemmpipe.events import Events
from gemmpipe.executors import Executor, Pool, Usage
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.formats import Format
from gemmpipe.interrupt import Interrupted, listening
from gemmpipe.journal import Journal, Record
from gemmpipe.search import Search
from gemmpipe.search.lore import Lore
from gemmpipe.sources import Source
from gemmpipe.space import Space
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.earlier import journals_of, teach_choices, unfinished
from gemmpipe.stages.incumbents import incumbents_of, native_tables
from gemmpipe.stages.rows import problem_frame, problems_of, record_frames
from gemmpipe.stopwatch import IDLE
from gemmpipe.tables.merging import SHARED

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a run needs, built from the configuration and checked."""

    version: int
    pipeline: str
    run_dir: Path
    family: Family
    defaults: KernelDefaults
    source: Source
    space: Space
    formats: Mapping[str, Format]
    backends: Mapping[str, Backend]
    search: Search
    devices: DeviceChoice
    executor: Executor
    stages: Mapping[str, Stage]
    chain: tuple[str, ...]
    output: str
    profile: str | None
    batch: int
    budget_s: float | None
    retune: bool
    verbose: bool
    resume: str | None
    reuse: str | None
    table: str | None
    inputs: tuple[str, ...]
    target: tuple[str, ...] | None
    overrides: tuple[str, ...]
    config: Mapping[str, object]
    """The composed configuration as plain values, for the manifest."""
    python_path: tuple[str, ...]
    allow_targets: tuple[str, ...]


def run(plan: Plan, events: Events) -> int:
    """Carry out a plan. Returns the exit code: 0 done, 1 a problem has no valid candidate, 130 interrupted.

    Raises UserError for a chain that cannot work and EnvironmentProblem where the machine gives out.
    """
    started = time.monotonic()
    reused = journals.read(Path(plan.reuse)) if plan.reuse else None
    check_chain(plan, reused)
    devices = _devices(plan, reused)
    writable("output", Path(plan.output))
    for key, path in _files(plan):
        if path.is_dir():
            raise UserError(f"{key}: {path} is a folder, expected a file")
    if plan.profile:
        writable("profile", Path(plan.profile).parent)
    journal = Journal(plan.run_dir)
    with ExitStack() as stack:
        stack.callback(journal.close)
        record = reused or journals.read(plan.run_dir)
        stop = stack.enter_context(listening(events, plan.budget_s))
        journal.write("session", **manifest.session(plan, devices[0]))
        if record.skipped:
            lines = ", ".join(map(str, record.skipped[:5]))
            where = Path(plan.reuse or plan.run_dir) / journals.NAME
            events.emit("warning", f"{where}: {len(record.skipped)} unreadable lines skipped: {lines} ...")
        if record.count and not plan.reuse:
            events.emit("line", f"resuming: {record.count:,} finished trials stand in {journal.path}")
        context = _context(plan, devices, journal, record, events, stop.check)
        for word in plan.chain:
            plan.stages[word].check(context)
        tables = record_frames(plan.family, record) if plan.reuse else {}
        context.watch.spent_s["start"] = time.monotonic() - started
        pool: Pool | None = None
        code = 0
        try:
            tables = _before_devices(plan, tables, context)
            if any(plan.stages[word].uses_device for word in plan.chain) and len(tables["problems"]):
                with context.watch.spending("start"):
                    pool = plan.executor.start(
                        devices, plan.family.name, tuple(plan.backends.values()), plan.python_path, events, stop.check
                    )
                stack.push(pool.__exit__)
                pool.watch = context.watch
                context = replace(context, running=pool)
            tables = _in_batches(plan, tables, context)
            code = 1 if context.unsolved else 0
        except Interrupted as stopped:
            tables = _what_is_done(plan, tables, context)
            code = stopped.exit_code
        with context.watch.spending("write"):
            manifest.write_tables(plan, tables)
        wall_s = time.monotonic() - started
        resources = usages(context, pool, wall_s)
        manifest.write(plan, tables, context, resources, wall_s, code)
        report.tell(plan, tables, context, resources, wall_s, code)
    return code


def usages(context: Context, pool: Pool | None, wall_s: float) -> list[Usage]:
    """Where the time of the driver, the compile slots and every worker went."""
    spent = dict(context.watch.spent_s)
    idle_s = spent.pop(IDLE, 0.0)
    driver = Usage(name="driver", wall_s=wall_s, busy_s=spent, idle=[(0.0, idle_s)])
    return [driver, *(pool.usage() if pool is not None else ())]


def check_chain(plan: Plan, reused: Record | None) -> None:
    """Every stage's needs are given by an earlier one, or by the run that is reused. Raises UserError."""
    if not plan.chain:
        raise UserError("chain: empty, expected stages such as [capture,screen,bench,select,merge]")
    have: set[str] = {"problems", "trials"} if reused else set()
    if reused and not reused.problems:
        raise UserError(f"reuse: {plan.reuse}: no journal with problems there; expected the folder of an earlier run")
    for word in plan.chain:
        missing = set(plan.stages[word].needs) - have
        if missing:
            raise UserError(f"chain: stage '{word}' needs {', '.join(sorted(missing))}, which no earlier stage gives")
        have |= set(plan.stages[word].gives)
    read = {key for word in plan.chain for key in plan.stages[word].reads}
    for key in ("table", "inputs", "target"):
        if getattr(plan, key) and key not in read:
            raise UserError(f"{key}: no stage of the pipeline '{plan.pipeline}' reads it; merge, verify or prebuild do")


def _files(plan: Plan) -> Iterator[tuple[str, Path]]:
    """The files that the run will write under a name the user may choose."""
    if plan.profile:
        yield "profile", Path(plan.profile)
    for name, each in plan.formats.items():
        table = each.table(plan.family, Path(plan.output))
        if table is not None:
            yield f"format.{name}", table


def writable(key: str, folder: Path) -> None:
    """Find out before hours of tuning, not after. Raises EnvironmentProblem naming the key."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # nameless: another run may try at this very moment
            pass
    except OSError as error:
        raise EnvironmentProblem(f"{key}: cannot write to {folder}: {error.strerror}") from None


def _devices(plan: Plan, reused: Record | None) -> tuple[Device, ...]:
    """The devices to run on; an old run is decided again for the device that it ran on."""
    stages = [plan.stages[word] for word in plan.chain]
    needed = any(stage.uses_device for stage in stages)
    if not needed and reused and reused.sessions:
        return (manifest.device_of(reused.sessions[-1]),)
    # A table is united on any machine, and while the GPU hangs too.
    return plan.executor.find(plan.devices) if needed or any(stage.asks_device for stage in stages) else (NO_DEVICE,)


def _context(
    plan: Plan, devices: tuple[Device, ...], journal: Journal, record: Record, events: Events, check: Callable[[], None]
) -> Context:
    implementations = tuple(i for b in plan.backends.values() for i in b.implementations(plan.family))
    from_tables = any(plan.stages[word].reads for word in plan.chain)  # what the output holds takes no part then
    lore = Lore()
    earlier = () if from_tables else _earlier(plan, devices[0], lore)
    return Context(
        family=plan.family,
        defaults=plan.defaults,
        source=plan.source,
        formats=tuple(plan.formats.items()),
        output=Path(plan.output),
        device=devices[0],
        retune=plan.retune,
        events=events,
        run_id=plan.run_dir.name,
        run_dir=plan.run_dir,
        provenance=manifest.provenance(plan, devices[0]),
        space=plan.space,
        search=plan.search,
        implementations=implementations,
        incumbents={}
        if from_tables
        else incumbents_of(plan.family, devices[0], Path(plan.output), plan.formats.values()),
        policy=_policy(devices[0]),
        journal=journal,
        record=record,
        running=None,
        check=check,
        table=Path(plan.table).expanduser() if plan.table else None,
        inputs=plan.inputs,
        targets=plan.target,
        python_path=plan.python_path,
        lore=lore,
        earlier=earlier,
        cut=set(record.cut),
    )


def _earlier(plan: Plan, device: Device, lore: Lore) -> tuple[Record, ...]:
    """Tell the searches what tables and journals know; returns the journals whose trials need not be made again."""
    if not any(plan.stages[word].uses_device for word in plan.chain):
        return ()
    tables = native_tables(plan.family, Path(plan.output), plan.formats.values())
    teach_choices(lore, tables, plan.family, device)
    left = unfinished(tables, plan.family, plan.run_dir.parent.parent)
    earlier = journals_of([*plan.search.journals, *left], plan.family, device)
    earlier.teach(lore)
    return earlier.like(versions())


def _policy(device: Device) -> str:
    """How times are taken: numbers of different policies are never compared silently."""
    words = "host interleaved" if device.kind == "cpu" else "graph cold interleaved"
    return f"{words} {SHARED}" if device.shared else words


def _before_devices(plan: Plan, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
    """The stages before the first that uses a device, over all problems at once."""
    for word in plan.chain[: _first_batched(plan)]:
        context.check()
        tables = {**tables, **_run_stage(plan, word, tables, context)}
        if "problems" in plan.stages[word].gives:
            for problem in problems_of(plan.family, tables["problems"]):
                key = dict(problem.key)
                context.journal.write("problem", id=problem.id, key=key, weight=problem.weight, layer=problem.layer)
    return tables


def _first_batched(plan: Plan) -> int:
    places = [i for i, word in enumerate(plan.chain) if plan.stages[word].uses_device]
    return places[0] if places else len(plan.chain)


def _run_stage(plan: Plan, word: str, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
    start = time.monotonic()
    with context.watch.spending(word):
        result = plan.stages[word].run(tables, context)
    context.account[f"{word}_s"] = context.account.get(f"{word}_s", 0.0) + time.monotonic() - start
    return result


def _in_batches(plan: Plan, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
    """The rest of the chain, batch by batch: a killed run leaves finished rows, and memory stays bounded."""
    first = _first_batched(plan)
    words, earlier = plan.chain[first:], _given(plan, plan.chain[:first], tables)
    if not words or not len(tables["problems"]):
        return tables
    problems = problems_of(plan.family, tables["problems"])
    total: dict[str, pd.DataFrame] = {}
    for batch in batches(problems, plan.batch):
        part = _rows_of({problem.id for problem in batch}, earlier)
        part["problems"] = problem_frame(plan.family, batch)
        for word in words:
            context.check()
            for name in plan.stages[word].sees_all_of:
                part[name] = _joined(total.pop(name, None), part[name])
            part = {**part, **_run_stage(plan, word, part, context)}
        total = {name: _joined(total.get(name), frame) for name, frame in part.items()}
    if "artifacts" in total:  # each batch writes the same files anew
        total["artifacts"] = total["artifacts"].drop_duplicates(ignore_index=True)
    return {**tables, **total}


def _given(plan: Plan, words: Sequence[str], tables: "Mapping[str, pd.DataFrame]") -> "dict[str, pd.DataFrame]":
    """The tables of these stages that have a row or more a problem."""
    names = [name for word in words for name in plan.stages[word].gives]
    return {name: tables[name] for name in names if "problem" in tables[name]}


def _rows_of(problems: set[str], tables: "Mapping[str, pd.DataFrame]") -> "dict[str, pd.DataFrame]":
    return {name: frame[frame["problem"].isin(problems)] for name, frame in tables.items()}


def _joined(before: "pd.DataFrame | None", frame: "pd.DataFrame") -> "pd.DataFrame":
    import pandas as pd

    return frame if before is None else pd.concat([before, frame], ignore_index=True)


def _what_is_done(plan: Plan, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
    """The rest of the chain for the problems whose finals are finished: who stops early keeps what was paid for."""
    devices = [i for i, word in enumerate(plan.chain) if plan.stages[word].uses_device]
    if plan.reuse or not devices or "problems" not in tables:
        return tables
    done = record_frames(plan.family, journals.read(plan.run_dir))
    if not len(done["problems"]):
        return tables
    finished = set(done["problems"]["problem"])
    missing = {p.siblings for p in problems_of(plan.family, tables["problems"]) if p.id not in finished}
    done = {**_rows_of(finished, _given(plan, plan.chain[: devices[0]], tables)), **done}
    for word in plan.chain[devices[-1] + 1 :]:
        done = {**done, **_run_stage(plan, word, done, context)}
        if "selections" in plan.stages[word].gives:
            # A bucket spans all problems that differ in M alone: it waits until the last of them is finished.
            chosen = done["selections"]
            rows = zip(chosen["format"], problems_of(plan.family, chosen.assign(M=1)), strict=True)
            done["selections"] = chosen[[form == "" or p.siblings not in missing for form, p in rows]]
    return {**tables, **done, "problems": tables["problems"]}


def batches(problems: list[Problem], size: int) -> Iterator[list[Problem]]:
    """Batches of about `size` problems; those that differ in M alone stay together, since buckets span them."""
    groups: dict[object, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.siblings, []).append(problem)
    batch: list[Problem] = []
    for group in groups.values():
        if batch and len(batch) + len(group) > size:
            yield batch
            batch = []
        batch += group
    if batch:
        yield batch
