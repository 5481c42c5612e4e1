"""Runs a plan: opens its journal and devices, runs its chain of stages over the problems, writes the manifest.

Stages before the first that uses a device run once over all problems, the rest batch by batch.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gemmpipe import journal as journals
from gemmpipe.core.data import Device, Problem
from gemmpipe.core.device import NO_DEVICE, versions
from gemmpipe.core.errors import GemmpipeError, UserError
from gemmpipe.core.events import IDLE, Events, counted
from gemmpipe.core.paths import REPORT
from gemmpipe.core.signals import Interrupted, handle_signals
from gemmpipe.executors import Usage
from gemmpipe.family import Family
from gemmpipe.family.environment import unused_variables
from gemmpipe.journal import Journal, Record
from gemmpipe.pipeline import manifest, steps, summary
from gemmpipe.pipeline.named_backends import named_backends
from gemmpipe.pipeline.plan import (
    Plan,
    check_chain,
    check_outputs,
    engine_targets_of,
    reproduce_args,
    with_engine_libraries,
    without_unavailable_functions,
)
from gemmpipe.pipeline.problem_list import lists_only, problem_lines
from gemmpipe.report.run_folder import has_trials
from gemmpipe.search.history import History
from gemmpipe.stages import Context
from gemmpipe.stages.cpu_budget import CpuBudget, left_line, tuning_order
from gemmpipe.stages.history import add_table_winners, incumbents_of, native_tables, prior_runs, unfinished_runs
from gemmpipe.stages.rows import empty_frame, problem_frame, problems_of, recorded_finals

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.backends import Backend


StageTables = dict[str, "pd.DataFrame"]
"""Tables by name: shortlist, trials, selections, artifacts, ..."""


def run_upfront_stages(plan: Plan, tables: StageTables, context: Context) -> StageTables:
    """Run the stages before the first that uses a device, over all problems at once."""
    for name in plan.chain[: _first_batched(plan)]:
        context.check()
        steps.emit_step(plan, name, context)
        tables = {**tables, **_run_stage(plan, name, tables, context)}
        if "problems" in plan.stages[name].gives:
            for problem in context.problems:
                key = dict(problem.key)
                context.journal.write("problem", id=problem.id, key=key, weight=problem.weight, layer=problem.layer)
    return tables


def _first_batched(plan: Plan) -> int:
    places = [i for i, name in enumerate(plan.chain) if plan.stages[name].uses_device]
    return places[0] if places else len(plan.chain)


def run_batched_stages(plan: Plan, tables: StageTables, context: Context) -> StageTables:
    """Run the rest of the chain batch by batch: a killed run leaves finished rows, and memory stays bounded."""
    if context.cpu_budget is not None and context.problems:
        return _run_within_budget(plan, tables, context, context.cpu_budget)
    first = _first_batched(plan)
    stages, earlier = plan.chain[first:], _tables_given(plan, plan.chain[:first], tables)
    if not stages or not context.problems:
        return tables
    total: dict[str, pd.DataFrame] = {}
    seen: list[Problem] = []
    finished = 0
    whole = {name for stage in stages if plan.stages[stage].accumulates for name in plan.stages[stage].gives}
    for batch in batches(context.problems, plan.batch, plan.family):
        later = len(context.problems) - finished - len(batch)
        inner = replace(context, problems=[*batch])
        part = _rows_of({problem.id for problem in batch}, earlier)
        for stage in stages:
            context.check()
            for name in plan.stages[stage].accumulates:
                if name == "problems":
                    inner, seen = replace(inner, problems=seen + inner.problems), []
                else:
                    part[name] = _concatenated(total.pop(name, None), part[name])
            steps.emit_step(plan, stage, inner, finished, later)
            inner = replace(inner, finals_s=None if finished else steps.finals_after(plan, stage, inner))
            part = {**part, **_run_stage(plan, stage, part, inner)}
        seen += inner.problems
        finished += len(batch)
        total = {
            name: frame if name in whole else _concatenated(total.get(name), frame) for name, frame in part.items()
        }
    context.problems[:] = seen
    return {**tables, **total}


def _run_within_budget(plan: Plan, tables: StageTables, context: Context, budget: CpuBudget) -> StageTables:
    """Run the device stages in passes over the problems that are left, then the rest of the chain over those done."""
    devices = [i for i, name in enumerate(plan.chain) if plan.stages[name].uses_device]
    earlier = _tables_given(plan, plan.chain[: devices[0]], tables)
    budget.began = time.monotonic()  # not while another run timed on this CPU
    budget.ready_at = partial(_ready_at, context, budget.began)
    if context.record.count and not plan.reuse:
        context.events.emit("line", f"cpu_budget_s={budget.limit_s:g} begins anew for what is left")
    compares = any(plan.stages[name].is_comparison for name in plan.chain)  # what is tuned is what it is about
    every = tuning_order(context.problems, plan.family, tuned=() if compares else context.incumbents)
    left, total, is_stuck = every, dict[str, "pd.DataFrame"](), False
    while left and (left is every or (budget.allows_pass and not is_stuck)):
        part, problems = _rows_of({problem.id for problem in left}, earlier), [*left]
        budget.passes += 1
        for stage in plan.chain[devices[0] : devices[-1] + 1]:
            context.check()
            inner = replace(context, problems=problems)
            steps.emit_step(plan, stage, inner, finished=len(every) - len(left))
            part |= _run_stage(plan, stage, part, inner)
            problems = [problem for problem in problems if problem.id not in budget.left]
            part = _rows_of({problem.id for problem in problems}, part)
        total = {name: _concatenated(total.get(name), frame) for name, frame in part.items()}
        is_stuck = len(problems) == 0  # all that is left takes too long
        left = [problem for problem in left if problem.id in budget.left]
        budget.left.clear()
    left = _without_recorded(plan, context, left, total)
    context.left[:] = [problem.id for problem in left]
    done = replace(context, problems=[problem for problem in every if problem not in left])
    for stage in plan.chain[devices[-1] + 1 :]:
        steps.emit_step(plan, stage, done)
        total |= _run_stage(plan, stage, total, done)
        if "selections" in plan.stages[stage].gives:
            total["selections"] = _without_partial_buckets(plan, total["selections"], left)
    if left:  # before the lines of the stages, which are about the others
        tunes = plan.table is None and not compares
        context.final_lines.insert(0, left_line(len(every), left, budget.limit_s, tunes=tunes))
    return {**tables, **total}


def _without_recorded(plan: Plan, context: Context, left: list[Problem], total: StageTables) -> list[Problem]:
    """The problems that are left, without those that an earlier session has finished: their trials are added.

    These have a choice, come last for that reason, and would be missing from the run's results otherwise.
    """
    if plan.table is not None or "trials" not in total or not context.record.finished:
        return left
    done, trials = recorded_finals(plan.family, context.record)
    names = {problem.id for problem in done} & {problem.id for problem in left}
    if names:
        total["trials"] = _concatenated(total["trials"], _rows_of(names, {"trials": trials})["trials"])
    return [problem for problem in left if problem.id not in names]


def _ready_at(context: Context, began: float) -> float | None:
    """When the first worker was ready, on the monotonic clock; None if none is; `began` where that is not known."""
    workers = context.pool.usage()[1:]
    if not workers:
        return began
    known = [began if each.ready_at is None else each.ready_at for each in workers if each.ready_at or each.busy_s]
    return min(known, default=None)


def batches(problems: list[Problem], size: int, family: Family) -> Iterator[list[Problem]]:
    """Batches of about `size` problems; those that differ in M or in conditions of the measurement alone stay together.

    Buckets span the Ms of a product, and searches learn from its other Ms and routings.
    """
    conditions = {column.name for column in family.key_columns if column.condition}
    groups: dict[object, list[Problem]] = {}
    for problem in problems:
        product = tuple(item for item in problem.shape_group if item[0] not in conditions)
        groups.setdefault(product, []).append(problem)
    batch: list[Problem] = []
    for group in groups.values():
        if batch and len(batch) + len(group) > size:
            yield batch
            batch = []
        batch += group
    if batch:
        yield batch


def finish_completed(plan: Plan, tables: StageTables, context: Context) -> StageTables:
    """Run the rest of the chain for problems with complete finals, so that an interrupted run keeps its results."""
    devices = [i for i, name in enumerate(plan.chain) if plan.stages[name].uses_device]
    if plan.reuse or not devices or not context.problems:
        return tables
    problems, trials = recorded_finals(
        plan.family, journals.read(plan.run_dir), context.engine_targets, per_problem=context.per_problem
    )
    if not problems:
        return tables
    finished = {problem.id for problem in problems}
    missing = [problem for problem in context.problems if problem.id not in finished]
    context = replace(context, problems=problems)
    done = {**_rows_of(finished, _tables_given(plan, plan.chain[: devices[0]], tables)), "trials": trials}
    for name in plan.chain[devices[-1] + 1 :]:
        if lacking := sorted(set(plan.stages[name].needs) - {"problems", *done}):
            context.events.emit("line", f"{name}: skipped; run again with resume=last (needs {', '.join(lacking)})")
            break
        done = {**done, **_run_stage(plan, name, done, context)}
        if "selections" in plan.stages[name].gives:
            done["selections"] = _without_partial_buckets(plan, done["selections"], missing)
    return {**tables, **done}


def _without_partial_buckets(plan: Plan, chosen: "pd.DataFrame", missing: Sequence[Problem]) -> "pd.DataFrame":
    """A bucket spans all problems that differ only in M: it is left out until all of them are finished."""
    if not len(chosen):
        return chosen
    groups = {problem.shape_group for problem in missing}
    rows = zip(chosen["format"], problems_of(plan.family, chosen.assign(**{plan.family.rows_column: 1})), strict=True)
    return chosen[[form == "" or p.shape_group not in groups for form, p in rows]]


def _run_stage(plan: Plan, name: str, tables: StageTables, context: Context) -> StageTables:
    """The tables of a stage. One of the user's may read the problems as a table, and return such a table."""
    stage = plan.stages[name]
    if stage.per_problem and not context.per_problem:
        return {table: tables.get(table, empty_frame(table)) for table in stage.gives}
    if not type(stage).__module__.startswith("gemmpipe."):
        tables = {**tables, "problems": problem_frame(plan.family, context.problems)}
    start = time.monotonic()
    try:
        with context.time_account.timed(name):
            result = dict(stage.run(tables, context))
    finally:  # also of a stage that is interrupted
        context.stage_seconds[f"{name}_s"] = context.stage_seconds.get(f"{name}_s", 0.0) + time.monotonic() - start
    if "problems" in result:
        context.problems[:] = problems_of(plan.family, result.pop("problems"))
    return result


def _tables_given(plan: Plan, stages: Sequence[str], tables: Mapping[str, "pd.DataFrame"]) -> StageTables:
    """The tables of these stages that have rows per problem."""
    names = [name for stage in stages for name in plan.stages[stage].gives]
    return {name: tables[name] for name in names if name in tables and "problem" in tables[name]}


def _rows_of(problems: set[str], tables: Mapping[str, "pd.DataFrame"]) -> StageTables:
    return {name: frame[frame["problem"].isin(problems)] for name, frame in tables.items()}


def _concatenated(before: "pd.DataFrame | None", frame: "pd.DataFrame") -> "pd.DataFrame":
    import pandas as pd

    return frame if before is None else pd.concat([before, frame], ignore_index=True)


def run(plan: Plan, events: Events) -> int:
    """Run a plan. Returns the exit code: 0 done, 1 a problem has no valid candidate, 130 interrupted.

    Raises UserError for an invalid chain and EnvironmentProblem for failures of the machine.
    """
    started = time.monotonic()
    reused = journals.read(Path(plan.reuse)) if plan.reuse else None
    check_chain(plan, reused)
    devices = _devices(plan, reused)
    plan = with_engine_libraries(without_unavailable_functions(plan, devices[0], events), devices[0], events)
    check_outputs(plan)
    for line in unused_variables().values():
        events.emit("warning", line)
    with ExitStack() as stack:
        journal = stack.enter_context(closing(Journal(plan.run_dir)))
        stop = stack.enter_context(handle_signals(events, plan.budget_s))
        record = _recorded_trials(plan, reused, events)
        journal.write("session", **manifest.session_row(plan, devices[0], record))
        context = _context(plan, devices, journal, record, events, stop.check)
        for name in plan.chain:
            plan.stages[name].check(context)
        tables: StageTables = {}
        if plan.reuse:
            context.problems[:], tables["trials"] = recorded_finals(
                plan.family, record, context.engine_targets, per_problem=context.per_problem
            )
        context.time_account.spent_s["start"] = time.monotonic() - started
        stack.enter_context(context.time_account.timed("between"))  # what no other purpose within it names
        stopped_early = False
        with _recording_abort(plan, context, started):
            try:
                tables = run_upfront_stages(plan, tables, context)
                context = _with_devices(plan, devices, context, stack)
                stop.has_workers = context.pool_or_none is not None
                tables = run_batched_stages(plan, tables, context)
                code = 1 if context.unsolved else 0
            except Interrupted as stopped:
                tables = finish_completed(plan, tables, context)
                code, stopped_early = stopped.exit_code, True
                _emit_saved(plan, events)
            with context.time_account.timed("write"):
                manifest.write_tables(plan, tables, context.problems)
            wall_s = time.monotonic() - started
            resources = usages(context, wall_s)
            manifest.write(plan, tables, context, resources, wall_s, code)
        for line in problem_lines(plan, context.problems, context.already_tuned) if lists_only(plan) else ():
            events.emit("line", line)
        summary.report_run(plan, tables, context, resources, wall_s, code, stopped_early=stopped_early)
    _write_report(plan, events)  # after the journal is closed: the run has ended
    return code


@contextmanager
def _recording_abort(plan: Plan, context: Context, started: float) -> Iterator[None]:
    """Write the manifest of a run that a second signal ends in the block: it was interrupted, not killed.

    Not where the journal has nothing to continue: that folder is removed.
    """
    try:
        yield
    except KeyboardInterrupt:
        if has_trials(plan.run_dir):
            wall_s = time.monotonic() - started
            with suppress(GemmpipeError, OSError):  # a full disk: the user's request to stop is what is reported
                manifest.write(plan, {}, context, [], wall_s, Interrupted.exit_code, aborted=True)
        raise


def _emit_saved(plan: Plan, events: Events) -> None:
    """Print the number of finished trials that an interrupted run has saved."""
    kept = counted(journals.read(plan.run_dir).count, "finished trial")
    events.emit("line", f"saved {kept} in {plan.run_dir / journals.NAME}")


def _write_report(plan: Plan, events: Events) -> None:
    """Write report.html if the plan asks for it; a failure is a warning, as the run's results are on the disk."""
    if not plan.report:
        return
    from gemmpipe.report.html import write
    from gemmpipe.report.reading import read_run

    try:
        importable = frozenset({plan.family.module, plan.family.name})
        events.emit("line", write(read_run(plan.run_dir, importable=importable), plan.run_dir / REPORT))
    except GemmpipeError as error:
        events.emit("warning", f"report: {error}")


def _recorded_trials(plan: Plan, reused: Record | None, events: Events) -> Record:
    """The trials of the reused run, then those of this run's earlier sessions."""
    if reused is not None:
        _warn_unreadable(Path(str(plan.reuse)), reused, events)
    before = reused.count if reused is not None else 0
    record = journals.read(plan.run_dir, after=reused)
    _warn_unreadable(plan.run_dir, record, events)
    own, had_finished = record.count - before, manifest.has_finished(plan.run_dir)
    if own:
        trials, ended = counted(own, "finished trial"), "; the run had finished" if had_finished else ""
        events.emit("line", f"resuming: {trials} in {plan.run_dir / journals.NAME}{ended}")
    elif had_finished:  # it timed nothing: a list of problems, a merge, all problems tuned already
        events.emit("line", f"resuming: {plan.run_dir}; the run had finished")
    return record


def _warn_unreadable(folder: Path, record: Record, events: Events) -> None:
    if record.skipped:
        lines = ", ".join(map(str, record.skipped[:5])) + (" ..." if len(record.skipped) > 5 else "")
        path = folder / journals.NAME
        events.emit("warning", f"{path}: unreadable lines skipped ({len(record.skipped):,}): {lines}")


def _with_devices(plan: Plan, devices: tuple[Device, ...], context: Context, stack: ExitStack) -> Context:
    """Start the workers, unless no stage needs them or there are no problems; they end with the stack."""
    if not any(plan.stages[name].uses_device for name in plan.chain) or not context.problems:
        return context
    context.events.emit("progress", "starting workers")
    engines = [engine for form in context.engine_targets if (engine := form.format.engine()) is not None]
    backends = cast("tuple[Backend, ...]", (*plan.backends.values(), *context.row_backends.values(), *engines))
    with context.time_account.timed("start"):
        pool = plan.executor.start(
            devices, plan.family.module, backends, plan.python_path, context.events, context.check
        )
    stack.push(pool.__exit__)
    pool.time_account = context.time_account
    if waited_s := pool.waited_s:
        context.time_account.spent_s["start"] -= waited_s
        context.time_account.spent_s[summary.WAITING] = waited_s
        context.stage_seconds[f"{summary.WAITING}_s"] = waited_s
    stack.callback(context.close_search_pools)
    return replace(context, pool_or_none=pool)


def usages(context: Context, wall_s: float) -> list[Usage]:
    """The time by activity of the driver, the search processes, the compile slots and every worker."""
    spent = dict(context.time_account.spent_s)
    idle_s = spent.pop(IDLE, 0.0)
    driver = Usage(name="driver", wall_s=wall_s, busy_s=spent, idle=[(0.0, idle_s)])
    searches = [usage for pool in context.search_pools.values() for usage in pool.usage()]
    return [driver, *searches, *(context.pool_or_none.usage() if context.pool_or_none is not None else ())]


def _devices(plan: Plan, reused: Record | None) -> tuple[Device, ...]:
    """The devices to run on; without device stages a reused run is for the device that it ran on."""
    stages = [plan.stages[name] for name in plan.chain]
    needed = any(stage.uses_device for stage in stages)
    if not needed and reused:
        if not reused.sessions:  # a damaged or foreign journal; rows without a device would corrupt the table
            raise UserError(f"reuse: {plan.reuse}: no journal row names the device; expected a session row")
        return (manifest.device_of(reused.sessions[-1]),)
    # Tables can be merged on any machine, also while its GPU hangs.
    return (
        plan.executor.find(plan.devices) if needed or any(stage.needs_device_info for stage in stages) else (NO_DEVICE,)
    )


def _context(
    plan: Plan, devices: tuple[Device, ...], journal: Journal, record: Record, events: Events, check: Callable[[], None]
) -> Context:
    implementations = tuple(i for b in plan.backends.values() for i in b.implementations(plan.family))
    from_tables = any(plan.stages[name].reads for name in plan.chain)  # the output is not read then
    history = History()
    prior = () if from_tables else _load_prior_runs(plan, devices[0], history)
    return Context(
        family=plan.family,
        defaults=plan.defaults,
        source=plan.source,
        named_backends=named_backends(plan),
        formats=tuple(plan.formats.items()),
        engine_targets=engine_targets_of(plan),
        output=Path(plan.output),
        device=devices[0],
        retune=plan.retune,
        events=events,
        run_id=plan.run_dir.name,
        run_dir=plan.run_dir,
        provenance=manifest.provenance(plan, devices[0]),
        cpu_budget=_cpu_budget(plan, devices[0]),
        space=plan.space,
        search=plan.search,
        rooflines=plan.rooflines,
        implementations=implementations,
        incumbents={}
        if from_tables
        else incumbents_of(plan.family, devices[0], Path(plan.output), plan.formats.values()),
        policy=manifest.policy_of_rows(plan, devices[0], record),
        journal=journal,
        record=record,
        pool_or_none=None,
        check=check,
        table=Path(plan.table).expanduser() if plan.table else None,
        inputs=plan.inputs,
        targets=plan.target,
        python_path=plan.python_path,
        reproduce_args=reproduce_args(plan),
        history=history,
        prior_records=prior,
        cut_short=set(record.cut_short),
    )


def _cpu_budget(plan: Plan, device: Device) -> CpuBudget | None:
    """The budget of a run on a CPU that times; None without one, and where engines' own functions are searched."""
    first = next((name for name in plan.chain if plan.stages[name].uses_device), None)
    limited = first is not None and plan.stages[first].begins_cpu_budget and not engine_targets_of(plan)
    if not limited or not plan.cpu_budget_s or device.kind != "cpu":
        return None
    kept = sum(plan.stages[name].cpu_budget_share for name in plan.chain)
    return CpuBudget(limit_s=plan.cpu_budget_s, kept_share=kept)


def _load_prior_runs(plan: Plan, device: Device, history: History) -> tuple[Record, ...]:
    """Fill `history` from tables and journals; returns the journals with trials that can be reused."""
    if not any(plan.stages[name].uses_device for name in plan.chain):
        return ()
    tables = native_tables(plan.family, Path(plan.output), plan.formats.values())
    add_table_winners(history, tables, plan.family, device)
    left = unfinished_runs(tables, plan.family, plan.run_dir.parent.parent)
    prior = prior_runs([*plan.search.journals, *left], plan.family, device)
    prior.fill_history(history)
    return prior.comparable(versions(), manifest.policy(plan, device))
