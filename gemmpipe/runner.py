"""Runs a plan: opens its journal and its devices, sends the problems through the chain, and leaves a manifest."""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gemmpipe import journal as journals
from gemmpipe import manifest, report
from gemmpipe.aiter_environment import advice
from gemmpipe.chain import Tables, before_devices, in_batches, what_is_done
from gemmpipe.data import Device
from gemmpipe.device import NO_DEVICE, versions
from gemmpipe.errors import UserError
from gemmpipe.events import Events
from gemmpipe.executors import Usage
from gemmpipe.interrupt import Interrupted, listening
from gemmpipe.journal import Journal, Record
from gemmpipe.plan import Plan, check_chain, check_outputs, forms_of, said_again
from gemmpipe.search.lore import Lore
from gemmpipe.stages import Context
from gemmpipe.stages.earlier import journals_of, teach_choices, unfinished
from gemmpipe.stages.hunting.beside import hunts_for
from gemmpipe.stages.incumbents import incumbents_of, native_tables
from gemmpipe.stages.rows import record_frames
from gemmpipe.stopwatch import IDLE
from gemmpipe.tables.merging import SHARED

if TYPE_CHECKING:
    from gemmpipe.backends import Backend


def run(plan: Plan, events: Events) -> int:
    """Carry out a plan. Returns the exit code: 0 done, 1 a problem has no valid candidate, 130 interrupted.

    Raises UserError for a chain that cannot work and EnvironmentProblem where the machine gives out.
    """
    started = time.monotonic()
    reused = journals.read(Path(plan.reuse)) if plan.reuse else None
    check_chain(plan, reused)
    devices = _devices(plan, reused)
    check_outputs(plan)
    for line in advice().values():
        events.emit("warning", line)
    with ExitStack() as stack:
        journal = stack.enter_context(closing(Journal(plan.run_dir)))
        stop = stack.enter_context(listening(events, plan.budget_s))
        record = _what_stands(plan, reused, events)
        journal.write("session", **manifest.session(plan, devices[0]))
        context = _context(plan, devices, journal, record, events, stop.check)
        for word in plan.chain:
            plan.stages[word].check(context)
        tables = record_frames(plan.family, record, context.forms, races=context.races) if plan.reuse else {}
        context.watch.spent_s["start"] = time.monotonic() - started
        stopped_early = False
        try:
            tables = before_devices(plan, tables, context)
            context = _with_devices(plan, devices, tables, context, stack)
            stop.has_workers = context.running is not None
            tables = in_batches(plan, tables, context)
            code = 1 if context.unsolved else 0
        except Interrupted as stopped:
            tables = what_is_done(plan, tables, context)
            code, stopped_early = stopped.exit_code, True
        with context.watch.spending("write"):
            manifest.write_tables(plan, tables)
        wall_s = time.monotonic() - started
        resources = usages(context, wall_s)
        manifest.write(plan, tables, context, resources, wall_s, code)
        report.tell(plan, tables, context, resources, wall_s, code, stopped_early=stopped_early)
    return code


def _what_stands(plan: Plan, reused: Record | None, events: Events) -> Record:
    """The trials of the run that is reused, then those of this run's earlier sessions."""
    if reused is not None:
        _tell_unreadable(Path(str(plan.reuse)), reused, events)
    before = reused.count if reused is not None else 0
    record = journals.read(plan.run_dir, after=reused)
    _tell_unreadable(plan.run_dir, record, events)
    if record.count > before:
        own = record.count - before
        events.emit("line", f"resuming: {own:,} finished trials stand in {plan.run_dir / journals.NAME}")
    return record


def _tell_unreadable(folder: Path, record: Record, events: Events) -> None:
    if record.skipped:
        lines = ", ".join(map(str, record.skipped[:5])) + (" ..." if len(record.skipped) > 5 else "")
        path = folder / journals.NAME
        events.emit("warning", f"{path}: unreadable lines skipped ({len(record.skipped):,}): {lines}")


def _with_devices(
    plan: Plan, devices: tuple[Device, ...], tables: Tables, context: Context, stack: ExitStack
) -> Context:
    """Start the workers, unless no stage needs them or there is nothing to do; they end with the stack."""
    if not any(plan.stages[word].uses_device for word in plan.chain) or not len(tables["problems"]):
        return context
    engines = [engine for form in context.forms if (engine := form.format.engine()) is not None]
    backends = cast("tuple[Backend, ...]", (*plan.backends.values(), *engines))
    with context.watch.spending("start"):
        pool = plan.executor.start(
            devices, plan.family.module, backends, plan.python_path, context.events, context.check
        )
    stack.push(pool.__exit__)
    pool.watch = context.watch
    context = replace(context, running=pool)
    hunts = hunts_for(context)
    stack.callback(hunts.close)
    return replace(context, hunts=hunts)


def usages(context: Context, wall_s: float) -> list[Usage]:
    """Where the time of the driver, the compile slots and every worker went."""
    spent = dict(context.watch.spent_s)
    idle_s = spent.pop(IDLE, 0.0)
    driver = Usage(name="driver", wall_s=wall_s, busy_s=spent, idle=[(0.0, idle_s)])
    beside = context.hunts.usage() if context.hunts is not None else ()
    return [driver, *beside, *(context.running.usage() if context.running is not None else ())]


def _devices(plan: Plan, reused: Record | None) -> tuple[Device, ...]:
    """The devices to run on; an old run is decided again for the device that it ran on."""
    stages = [plan.stages[word] for word in plan.chain]
    needed = any(stage.uses_device for stage in stages)
    if not needed and reused:
        if not reused.sessions:  # spoilt, or a stranger's: rows of no device would spoil the table too
            raise UserError(f"reuse: {plan.reuse}: no row of its journal tells the device it ran on; expected one")
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
        forms=forms_of(plan),
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
        words=said_again(plan),
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
