"""A plan: all that a run needs, and the checks before it runs."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gemmpipe.backends import Backend, library_backends
from gemmpipe.core.data import Device
from gemmpipe.core.device import DeviceChoice
from gemmpipe.core.errors import EnvironmentProblem, UserError
from gemmpipe.core.events import Events
from gemmpipe.core.paths import unwritable_reason
from gemmpipe.executors import Executor
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.family.roofline import Roofline
from gemmpipe.family.space import Space
from gemmpipe.formats import Format
from gemmpipe.journal import Record
from gemmpipe.listeners import Listener
from gemmpipe.report.run_folder import nothing_timed
from gemmpipe.search import Search
from gemmpipe.sources import Source
from gemmpipe.stages import EngineTarget, Stage


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The objects built from a configuration, each value checked on its own."""

    version: int
    pipeline: str
    run_dir: Path
    family: Family
    defaults: KernelDefaults
    source: Source
    space: Space
    formats: Mapping[str, Format]
    backends: Mapping[str, Backend]
    named_backends: Mapping[str, tuple[str, ...]]
    """By word of `backend=` as typed, but for `default`: the names of the backends that it stands for."""
    search: Search
    rooflines: Mapping[str, Roofline]
    devices: DeviceChoice
    executor: Executor
    listeners: Mapping[str, Listener]
    stages: Mapping[str, Stage]
    chain: tuple[str, ...]
    output: str
    profile: str | None
    batch: int
    budget_s: float | None
    cpu_budget_s: float | None
    retune: bool
    report: bool
    open: bool | None
    """True if the report is opened in a browser; None: only where a person can see it."""
    verbose: bool
    events: str
    """`terminal`, or `json` for a stream of JSON on standard output."""
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


_REPRODUCED_GROUPS = ("kernel", "space", "backend", "device", "executor")


def reproduce_args(plan: Plan) -> tuple[str, ...]:
    """The overrides that select kernels, backends, devices and workers, as typed: for commands that the user pastes."""
    groups = [re.split(r"[=.@]", override.lstrip("+~"), maxsplit=1)[0] for override in plan.overrides]
    typed = [each for each, group in zip(plan.overrides, groups, strict=True) if group in _REPRODUCED_GROUPS]
    return (*(f"--config-dir={folder}" for folder in plan.python_path), *typed)


def engine_targets_of(plan: Plan) -> tuple[EngineTarget, ...]:
    """The formats for engines' own functions that a stage of the chain searches, or for `reuse=` may have searched.

    Raises UserError.
    """
    names = plan.stages if plan.reuse else plan.chain
    return tuple(target for name in names for target in plan.stages[name].engine_targets(plan.family, plan.formats))


def without_unavailable_functions(plan: Plan, device: Device, events: Events) -> Plan:
    """The plan without the formats of engines whose functions this device cannot run, with a warning; else as it is.

    Raises UserError if no other format is left.
    """
    reasons = {t.name: why for t in engine_targets_of(plan) if (why := t.implementation.unavailable(device))}
    if not reasons:
        return plan
    names = ", ".join(reasons)
    kept = {name: each for name, each in plan.formats.items() if name not in reasons}
    why = f"format: {names}: its functions cannot be timed here ({next(iter(reasons.values()))})"
    if not kept:
        raise UserError(f"{why}; expected a GPU, or format=[csv] for the tuned table")
    events.emit("warning", f"{why}: left out")
    return replace(plan, formats=kept)


def with_engine_libraries(plan: Plan, device: Device, events: Events) -> Plan:
    """The plan with the libraries of the engine that the problems are for, where the user does not choose the backends.

    A warning names those that cannot be timed here: the engine may be faster with them than the rows chosen.
    """
    if any(each.startswith("backend=") for each in plan.overrides):
        return plan
    if not any("selections" in plan.stages[name].gives for name in plan.chain):
        return plan
    try:
        labels = plan.source.engine_libraries(plan.family, plan.defaults, device.gfx)
    except UserError:
        return plan  # reported by the stage that reads the source; a reused run needs none
    added = {label: library_backends()[label] for label in labels if label not in plan.backends}
    for label, library in added.items():
        if reason := library.unavailable(device):
            events.emit("warning", f"{label}, the engine's own library, cannot be timed here: {reason}")
    if added:
        events.emit("line", f"also timed: {', '.join(added)}, which the engine itself calls for these products")
    return replace(plan, backends={**plan.backends, **added})


def check_chain(plan: Plan, reused: Record | None) -> None:
    """Raises UserError if a stage needs a table that neither an earlier stage nor the reused run gives."""
    if not plan.chain:
        raise UserError("chain: empty, expected stages such as [capture,screen,bench,select,merge]")
    have: set[str] = {"problems"} if reused else set()
    if reused and not reused.problems:
        reason = nothing_timed(Path(str(plan.reuse)))
        reason = reason or "no journal with problems there; expected the folder of an earlier run"
        raise UserError(f"reuse: {plan.reuse}: {reason}")
    if reused and reused.count:
        have.add("trials")
    for current in plan.chain:
        missing = set(plan.stages[current].needs) - have
        if missing:
            givers = [name for name, stage in plan.stages.items() if missing & set(stage.gives) and name != current]
            hint = f"; expected {' or '.join(sorted(givers))} before it" if givers else ""
            tables, also = ", ".join(sorted(missing)), " nor the reused run" if reused else ""
            raise UserError(f"chain: stage '{current}' needs {tables}, which no earlier stage{also} gives{hint}")
        have |= set(plan.stages[current].gives)
    read = {key for name in plan.chain for key in plan.stages[name].reads}
    for key in ("table", "inputs", "target"):
        if getattr(plan, key) and key not in read:
            raise UserError(f"{key}: no stage of the pipeline '{plan.pipeline}' reads it; merge, verify or prebuild do")


def check_outputs(plan: Plan) -> None:
    """Raises EnvironmentProblem or UserError, naming the key, if an output file of the plan cannot be written."""
    require_writable("output", Path(plan.output))
    for key, path in _files(plan):
        if path.is_dir():
            raise UserError(f"{key}: {path} is a folder, expected a file")
        require_writable(key, path.parent)


def check_recipe_paths(plan: Plan, recipe: str, typed: frozenset[str]) -> None:
    """Raises UserError if a recipe names an output file outside the current directory, also through links.

    Files of keys that the user `typed` may be anywhere. A link with the file's own name is replaced, not followed.
    """
    roots = [Path.cwd().resolve(), *([Path(plan.output).resolve()] if "output" in typed else [])]
    for name, each in plan.formats.items():
        key, path = f"format.{name}.file", each.named_file(Path(plan.output))
        if path is None or key in typed:
            continue
        if not any(path.parent.resolve().is_relative_to(root) for root in roots):
            raise UserError(
                f"{recipe}: {key}: {path} is outside the current directory; expected a path in it, or type it"
            )


def _files(plan: Plan) -> Iterator[tuple[str, Path]]:
    """The files that the run will write under names that the user can set."""
    if plan.profile:
        yield "profile", Path(plan.profile)
    for name, each in plan.formats.items():
        table = each.table(plan.family, Path(plan.output))
        if table is not None:
            yield f"format.{name}", table


def require_writable(key: str, folder: Path) -> None:
    """Raises EnvironmentProblem, naming the key, if the folder is not writable: before hours of tuning, not after."""
    if why := unwritable_reason(folder):
        raise EnvironmentProblem(f"{key}: cannot write to {folder}: {why}")
