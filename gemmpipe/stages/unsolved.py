"""Problems that end without a choice: why, and whether a run that goes on may still find one."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemmpipe.data import Problem, Status
from gemmpipe.events import counted
from gemmpipe.search import Search
from gemmpipe.stages import Context

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 3
_PASSED_OVER = {str(Status.UNFIT), str(Status.DROPPED)}


def tell_unsolved(problem: Problem, trials: "pd.DataFrame", gated: int, limit_pct: float, context: Context) -> None:
    """Note a problem that nothing was chosen for; `gated` of its finalists would take more than `limit_pct` of weight.

    Where a budget ended its search the problem is not unsolved: the end of the run tells of it.
    """
    if problem.id in context.cut:
        context.undecided.append(problem.id)
        return
    context.unsolved.append(problem.id)
    if gated:
        weight = f"more weight memory than stages.select.max_extra_weight_pct={limit_pct:g} allows"
        why = f"{counted(gated, 'candidate')} passed, but for {weight}"
    else:
        why = _failures(trials[trials["problem"] == problem.id])
    context.events.emit("warning", f"no valid candidate for {problem.id}: {why}")


def _failures(trials: "pd.DataFrame") -> str:
    """What became of a problem's candidates: of the finalists, else of those that were tried, else of all."""
    if not len(trials):
        return "no candidate of these backends in this space"
    tried = trials[~trials["status"].isin(_PASSED_OVER)]
    furthest = next(part for part in (tried[tried["stage"] == "bench"], tried, trials) if len(part))
    counts = Counter(furthest["status"].tolist())
    errors = Counter(text for text in furthest["error"].tolist() if text)
    said = ", ".join(f"{number:,} {status}" for status, number in counts.most_common())
    return f"{said}; such as: {errors.most_common(1)[0][0]}" if errors else said


def undecided_line(problems: Sequence[str], search: Search) -> str:
    """The line about problems whose searches ended before anybody valid was found."""
    shown = ", ".join(problems[:_SHOWN]) + (f" and {len(problems) - _SHOWN:,} more" if len(problems) > _SHOWN else "")
    budgets = {"search.budget_trials": search.budget_trials, "search.budget_s": search.budget_s}
    spent = " and ".join(f"{name}={value:g}" for name, value in budgets.items() if value is not None)
    left = f"{spent or 'a budget'} left {counted(len(problems), 'problem')} without a valid candidate so far"
    return f"select: {left}: {shown}"
