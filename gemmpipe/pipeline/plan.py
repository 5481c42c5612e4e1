"""A plan: everything a run needs, and what can be wrong with it before anything runs."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.backends import Backend
from gemmpipe.core.device import DeviceChoice
from gemmpipe.core.errors import EnvironmentProblem, UserError
from gemmpipe.core.paths import unwritable_reason
from gemmpipe.executors import Executor
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.family.space import Space
from gemmpipe.formats import Format
from gemmpipe.journal import Record
from gemmpipe.search import Search
from gemmpipe.sources import Source
from gemmpipe.stages import EngineTarget, Stage


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Built from the configuration, every value checked by itself."""

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


_REPRODUCED_GROUPS = ("kernel", "space", "backend", "device", "executor")


def reproduce_args(plan: Plan) -> tuple[str, ...]:
    """The words, as they were typed, of whose kernels are meant and who computes them where: for lines to paste."""
    groups = [re.split(r"[=.@]", word.lstrip("+~"), maxsplit=1)[0] for word in plan.overrides]
    typed = [word for word, group in zip(plan.overrides, groups, strict=True) if group in _REPRODUCED_GROUPS]
    return (*(f"--config-dir={folder}" for folder in plan.python_path), *typed)


def engine_targets_of(plan: Plan) -> tuple[EngineTarget, ...]:
    """The formats for engines' own functions that a stage of the chain searches.

    Or may have searched, where an earlier run is decided again. Raises UserError.
    """
    words = plan.stages if plan.reuse else plan.chain
    return tuple(
        engine_target for word in words for engine_target in plan.stages[word].engine_targets(plan.family, plan.formats)
    )


def check_chain(plan: Plan, reused: Record | None) -> None:
    """Every stage's needs are given by an earlier one, or by the run that is reused. Raises UserError."""
    if not plan.chain:
        raise UserError("chain: empty, expected stages such as [capture,screen,bench,select,merge]")
    have: set[str] = {"problems"} if reused else set()
    if reused and not reused.problems:
        raise UserError(f"reuse: {plan.reuse}: no journal with problems there; expected the folder of an earlier run")
    if reused and reused.count:
        have.add("trials")
    for word in plan.chain:
        missing = set(plan.stages[word].needs) - have
        if missing:
            givers = [name for name, stage in plan.stages.items() if missing & set(stage.gives) and name != word]
            those = f"; {' or '.join(sorted(givers))} before it would" if givers else ""
            lacking, also = ", ".join(sorted(missing)), " nor the run that is reused" if reused else ""
            raise UserError(f"chain: stage '{word}' needs {lacking}, which no earlier stage{also} gives{those}")
        have |= set(plan.stages[word].gives)
    read = {key for word in plan.chain for key in plan.stages[word].reads}
    for key in ("table", "inputs", "target"):
        if getattr(plan, key) and key not in read:
            raise UserError(f"{key}: no stage of the pipeline '{plan.pipeline}' reads it; merge, verify or prebuild do")


def check_outputs(plan: Plan) -> None:
    """Every file can be written where the plan wants it. Raises EnvironmentProblem or UserError naming the key."""
    require_writable("output", Path(plan.output))
    for key, path in _files(plan):
        if path.is_dir():
            raise UserError(f"{key}: {path} is a folder, expected a file")
        require_writable(key, path.parent)


def check_recipe_paths(plan: Plan, recipe: str, typed: frozenset[str]) -> None:
    """A file that a recipe names lies below the current directory, also behind links of the output folder.

    What the user `typed` may lie anywhere. A link under the file's own name is replaced, never written through.
    Raises UserError.
    """
    roots = [Path.cwd().resolve(), *([Path(plan.output).resolve()] if "output" in typed else [])]
    for name, each in plan.formats.items():
        key, path = f"format.{name}.file", each.named_file(Path(plan.output))
        if path is None or key in typed:
            continue
        if not any(path.parent.resolve().is_relative_to(root) for root in roots):
            raise UserError(f"{recipe}: {key}: {path} lies elsewhere; expected a place below this folder, or type it")


def _files(plan: Plan) -> Iterator[tuple[str, Path]]:
    """The files that the run will write under a name the user may choose."""
    if plan.profile:
        yield "profile", Path(plan.profile)
    for name, each in plan.formats.items():
        table = each.table(plan.family, Path(plan.output))
        if table is not None:
            yield f"format.{name}", table


def require_writable(key: str, folder: Path) -> None:
    """Find out before hours of tuning, not after. Raises EnvironmentProblem naming the key."""
    if why := unwritable_reason(folder):
        raise EnvironmentProblem(f"{key}: cannot write to {folder}: {why}")
