"""The chain of stages over the problems: the first stages once over all, the rest batch by batch."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gemmpipe import journal as journals
from gemmpipe.data import Problem
from gemmpipe.plan import Plan
from gemmpipe.problem import siblings
from gemmpipe.stages import Context
from gemmpipe.stages.rows import empty_frame, problem_frame, problems_of, record_frames

if TYPE_CHECKING:
    import pandas as pd

Tables = dict[str, "pd.DataFrame"]
"""Tables by name."""


def before_devices(plan: Plan, tables: Tables, context: Context) -> Tables:
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


def in_batches(plan: Plan, tables: Tables, context: Context) -> Tables:
    """The rest of the chain, batch by batch: a killed run leaves finished rows, and memory stays bounded."""
    first = _first_batched(plan)
    words, earlier = plan.chain[first:], _given(plan, plan.chain[:first], tables)
    if not words or not len(tables["problems"]):
        return tables
    problems = problems_of(plan.family, tables["problems"])
    total: dict[str, pd.DataFrame] = {}
    whole = {name for word in words if plan.stages[word].sees_all_of for name in plan.stages[word].gives}
    for batch in batches(problems, plan.batch):
        part = _rows_of({problem.id for problem in batch}, earlier)
        part["problems"] = problem_frame(plan.family, batch)
        for word in words:
            context.check()
            for name in plan.stages[word].sees_all_of:
                part[name] = _joined(total.pop(name, None), part[name])
            part = {**part, **_run_stage(plan, word, part, context)}
        total = {name: frame if name in whole else _joined(total.get(name), frame) for name, frame in part.items()}
    return {**tables, **total}


def batches(problems: list[Problem], size: int) -> Iterator[list[Problem]]:
    """Batches of about `size` problems; those that differ in M alone stay together, since buckets span them."""
    batch: list[Problem] = []
    for group in siblings(problems):
        if batch and len(batch) + len(group) > size:
            yield batch
            batch = []
        batch += group
    if batch:
        yield batch


def what_is_done(plan: Plan, tables: Tables, context: Context) -> Tables:
    """The rest of the chain for the problems whose finals are finished: who stops early keeps what was paid for."""
    devices = [i for i, word in enumerate(plan.chain) if plan.stages[word].uses_device]
    if plan.reuse or not devices or "problems" not in tables:
        return tables
    done = record_frames(plan.family, journals.read(plan.run_dir), context.forms, races=context.races)
    if not len(done["problems"]):
        return tables
    finished = set(done["problems"]["problem"])
    missing = {p.siblings for p in problems_of(plan.family, tables["problems"]) if p.id not in finished}
    done = {**_rows_of(finished, _given(plan, plan.chain[: devices[0]], tables)), **done}
    for word in plan.chain[devices[-1] + 1 :]:
        if lacking := sorted(set(plan.stages[word].needs) - set(done)):
            context.events.emit("line", f"{word}: left for resume=last, which has {', '.join(lacking)}")
            break
        done = {**done, **_run_stage(plan, word, done, context)}
        if "selections" in plan.stages[word].gives:
            # A bucket spans all problems that differ in M alone: it waits until the last of them is finished.
            chosen = done["selections"]
            rows = zip(
                chosen["format"], problems_of(plan.family, chosen.assign(**{plan.family.rows_column: 1})), strict=True
            )
            done["selections"] = chosen[[form == "" or p.siblings not in missing for form, p in rows]]
    return {**tables, **done, "problems": tables["problems"]}


def _run_stage(plan: Plan, word: str, tables: Tables, context: Context) -> Tables:
    if plan.stages[word].races and not context.races:
        return {name: tables.get(name, empty_frame(name)) for name in plan.stages[word].gives}
    start = time.monotonic()
    with context.watch.spending(word):
        result = plan.stages[word].run(tables, context)
    context.account[f"{word}_s"] = context.account.get(f"{word}_s", 0.0) + time.monotonic() - start
    return result


def _given(plan: Plan, words: Sequence[str], tables: Mapping[str, "pd.DataFrame"]) -> Tables:
    """The tables of these stages that have a row or more a problem."""
    names = [name for word in words for name in plan.stages[word].gives]
    return {name: tables[name] for name in names if "problem" in tables[name]}


def _rows_of(problems: set[str], tables: Mapping[str, "pd.DataFrame"]) -> Tables:
    return {name: frame[frame["problem"].isin(problems)] for name, frame in tables.items()}


def _joined(before: "pd.DataFrame | None", frame: "pd.DataFrame") -> "pd.DataFrame":
    import pandas as pd

    return frame if before is None else pd.concat([before, frame], ignore_index=True)
