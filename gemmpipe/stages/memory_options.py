"""Faster candidates that need a copy of the weight in more memory than the user allows, as rows of a table.

The rows of a problem are a front: each beats every candidate with less memory, so that a reader can choose any limit
(`stages.select.max_extra_weight_pct`) and find the fastest candidate within it. What a limit gains over all problems
of a run is presented by `gemmpipe.report.screen`, since an engine decides about the memory of a whole model.
"""

import math
from collections.abc import Iterable

from gemmpipe.core.data import Problem
from gemmpipe.stages.rows import config_text
from gemmpipe.stages.selection_rules import Finalist


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
