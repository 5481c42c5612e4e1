"""Faster candidates that need a copy of the weight in more memory than the user allows: rows, and lines about them.

An engine decides about the memory of a whole model, so that the lines give the gain per limit, over all problems.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from gemmpipe.core.data import Problem
from gemmpipe.core.events import counted
from gemmpipe.core.units import bytes_text, speedup_text, time_text
from gemmpipe.stages.rows import config_text
from gemmpipe.stages.selection_rules import Finalist

if TYPE_CHECKING:
    import pandas as pd

_KEY = "stages.select.max_extra_weight_pct"
_MAX_LIMITS = 5


def memory_options(
    problem: Problem, weight_bytes: float, finalists: Iterable[Finalist], chosen: Finalist
) -> list[dict[str, object]]:
    """The rows of a problem: for each amount of memory above the chosen one's, the candidate that beats all with less.

    `weight_bytes`: of the stored weight, without copies.
    """
    found: list[dict[str, object]] = []
    best_us = chosen.time_us
    for each in sorted(finalists, key=lambda f: (f.extra_weight_bytes, f.time_us, f.candidate.id)):
        if each.extra_weight_bytes <= chosen.extra_weight_bytes or each.time_us >= best_us:
            continue
        if found and found[-1]["extra_weight_bytes"] == each.extra_weight_bytes:
            continue
        best_us = each.time_us
        found.append(
            {
                "problem": problem.id,
                "M": problem.rows,
                "libtype": each.candidate.backend,
                "config": config_text(each.candidate),
                "us": round(each.time_us, 4),
                "chosen_us": round(chosen.time_us, 4),
                "speedup": round(chosen.time_us / each.time_us, 4),
                "extra_weight_bytes": each.extra_weight_bytes,
                "extra_weight_pct": math.ceil(100 * each.extra_weight_bytes / weight_bytes),
                "weight": problem.weight,
                "shared": each.shared or chosen.shared,
            }
        )
    return found


def option_lines(options: "pd.DataFrame | None", solved: int) -> list[str]:
    """A table of limits on a run's memory: the problems that gain, by how much, and the memory per weight.

    `options`: rows of `memory_options` of all problems, or None; `solved`: the number of problems with a selection.
    """
    if options is None or not len(options):
        return []
    rows = cast("list[Mapping[str, object]]", options.to_dict("records"))
    limits = sorted({int(str(row["extra_weight_pct"])) for row in rows})
    cells = [("LIMIT", "faster", "speed-up (least to most)", "a call (geometric mean)", "memory per weight")]
    cells += [_limit_cells(limit, rows) for limit in limits[:_MAX_LIMITS]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    count = len({row["problem"] for row in rows})
    title = f"faster with more memory for weights ({_KEY}=LIMIT): {count} of {counted(solved, 'problem')}"
    more = [f"  and {len(limits) - _MAX_LIMITS} more limits"] if len(limits) > _MAX_LIMITS else []
    return [title, *(f"  {line.rstrip()}" for line in lines), *more]


def _limit_cells(limit_pct: int, rows: Sequence[Mapping[str, object]]) -> tuple[str, str, str, str, str]:
    """The cells of one limit: over the fastest allowed option of each problem that has one."""
    best: dict[object, Mapping[str, object]] = {}
    for row in rows:
        if _number(row, "extra_weight_pct") <= limit_pct and (
            row["problem"] not in best or _number(row, "us") < _number(best[row["problem"]], "us")
        ):
            best[row["problem"]] = row
    gains = [_number(row, "speedup") for row in best.values()]
    sizes = [_number(row, "extra_weight_bytes") for row in best.values()]
    before, after = (_geomean([_number(row, name) for row in best.values()]) for name in ("chosen_us", "us"))
    span = f"{speedup_text(_geomean(gains))} ({speedup_text(min(gains))} to {speedup_text(max(gains))})"
    least, most = bytes_text(min(sizes)), bytes_text(max(sizes))
    return (
        str(limit_pct),
        counted(len(best), "problem"),
        span,
        f"{time_text(before)} -> {time_text(after)}",
        f"+{least}" if least == most else f"+{least} to +{most}",
    )


def _number(row: Mapping[str, object], name: str) -> float:
    return float(str(row[name]))


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
