"""The end of a run that only lists problems: the problems or products, their file, and the command that tunes them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gemmpipe.core.data import Problem
from gemmpipe.core.paths import PROBLEMS
from gemmpipe.core.shell import shell_join
from gemmpipe.core.units import count_text, key_text, ranges_text

if TYPE_CHECKING:
    from gemmpipe.family import Family
    from gemmpipe.pipeline.plan import Plan

_MAX_ROWS = 10
_MAX_LAYER = 40
"""Characters of a layer's name that are shown, from its end."""


def lists_only(plan: "Plan") -> bool:
    """True if the stages of a run give problems and nothing else."""
    return bool(plan.chain) and {table for name in plan.chain for table in plan.stages[name].gives} == {"problems"}


def problem_lines(plan: "Plan", problems: Sequence[Problem], tuned: Sequence[Problem]) -> Iterator[str]:
    """The problems as aligned columns (key columns that differ, calls, layer), and where all of them are.

    Many problems are listed by product, with their Ms and the calls of each. Where all are `tuned` already, these.
    """
    if problems:
        yield from _table_lines(plan, problems)
        path = plan.run_dir / PROBLEMS
        yield f"problems  {path}"
        kernel = next((o for o in plan.overrides if o.startswith("kernel=")), f"kernel={plan.family.name}")
        yield "tune them with: " + shell_join(["gemmpipe", kernel, "shapes=csv", f"shapes.path={path}"])
    elif tuned:
        yield from _table_lines(plan, tuned)
        command = shell_join(["gemmpipe", *plan.overrides, "retune=true"])
        yield f"all are tuned already, in {plan.output}; tune them again with: {command}"


def _table_lines(plan: "Plan", problems: Sequence[Problem]) -> Iterator[str]:
    """The rows of the problems, or of their products where they are many."""
    names = [column.name for column in plan.family.key_columns]
    shown = [
        name
        for i, name in enumerate(names)
        if i < len("MNK") or len({problem.key[i][1] for problem in problems}) > 1  # sizes, and what distinguishes rows
    ]
    groups = [[problem] for problem in problems]
    if len(problems) > _MAX_ROWS:
        by_product: dict[object, list[Problem]] = {}
        for problem in problems:
            by_product.setdefault((problem.shape_group, problem.layer), []).append(problem)
        groups = list(by_product.values())
    title = "layer" if any(problem.layer for problem in problems) else ""  # none over an empty column
    rows = [[*shown, "calls", title], *(_cells(group, shown, plan.family) for group in groups[:_MAX_ROWS])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        numbers = "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True))
        yield f"  {numbers}  {row[-1]}".rstrip()
    if len(groups) > _MAX_ROWS:
        yield f"  ... and {count_text(len(groups) - _MAX_ROWS)} more"


def _cells(problems: Sequence[Problem], shown: Sequence[str], family: "Family") -> list[str]:
    """The cells of problems that differ in M alone."""
    key = dict(problems[0].key)
    rows = ranges_text([p.rows for p in problems]) if len(problems) > 1 else str(problems[0].rows)
    layer = problems[0].layer or ""
    short = layer if len(layer) <= _MAX_LAYER else f"...{layer[-_MAX_LAYER:]}"
    cells = [rows if name == family.rows_column else key_text(key[name]) for name in shown]
    least, most = min(p.weight for p in problems), max(p.weight for p in problems)
    return [*cells, f"{least:g}" if least == most else f"{least:g} to {most:g}", short]
