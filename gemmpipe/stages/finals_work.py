"""The work of the finals, estimated from the times of screening: the share that is done, and the part within a budget.

A job runs to its end once a worker has it, and finals of a large product on a CPU can take longer than the rest of the
budget. Such a job is shortened to the finalists that fit before it is sent, or left for the next run.
"""

import math
import time
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gemmpipe.bench.jobs import Job
from gemmpipe.bench.timer import Timer
from gemmpipe.core.data import Candidate
from gemmpipe.core.events import counted, verb
from gemmpipe.stages import Context
from gemmpipe.stages.cpu_budget import SHORT_S, CpuBudget, RunEnd
from gemmpipe.stages.finals_cost import FinalsCost, cpu_finalist_s

if TYPE_CHECKING:
    import pandas as pd

_USUAL_TIMER = Timer(warmup=5, iters=101, rounds=30, budget_ms=250)  # as conf/timer/accurate.yaml has it
COMPARED = ("compared", "unlike")
"""Roles of a comparison's entries in the shortlist: no screening has launched them."""
Row = Mapping[Hashable, object]


class FinalsWork:
    """The expected time of each finalist, in seconds."""

    def __init__(
        self,
        rows: Mapping[str, Sequence[Row]],
        pending: Mapping[str, Collection[Candidate]],
        costs: Mapping[str, FinalsCost],
        expected_us: Mapping[str, float] | None = None,
        first_s: Mapping[tuple[str, str], float] | None = None,
    ) -> None:
        """`rows`: the finalists of the shortlist, `costs`: what they cost; by problem id, as `pending`.

        `pending`: those without a trial. `expected_us`: the time of finalists that screening has not timed. `first_s`:
        by (problem id, candidate id), by how much longer its first launch takes.
        """
        expected, first = expected_us or {}, first_s or {}
        self._setup_s = {name: costs[name].setup_s for name in pending}
        self._costs_s: dict[str, dict[str, float]] = {}
        """By problem id, then candidate id."""
        for name in pending:
            self._costs_s[name] = {
                str(row["candidate"]): _finalist_s(row, costs[name], expected.get(name))
                + first.get((name, str(row["candidate"])), 0.0)
                for row in rows.get(name, ())
            }
        self._total_s = self.left_s(pending)

    def cost_s(self, problem: str, candidates: Collection[Candidate]) -> float:
        """The time of these finalists of a problem."""
        return sum(self._costs_s[problem].get(c.id, 0.0) for c in candidates)

    def leave_out(self, problem: str, candidates: Collection[Candidate]) -> None:
        """Removes finalists from the work: they are not timed."""
        self._total_s -= self.cost_s(problem, candidates)

    def leave_problem(self, problem: str, candidates: Collection[Candidate]) -> None:
        """Removes a problem with its open finalists from the work."""
        self._total_s -= self._setup_s[problem] + self.cost_s(problem, candidates)

    @property
    def total_s(self) -> float:
        """The time of all of it."""
        return self._total_s

    def share(self, pending: Mapping[str, Collection[Candidate]]) -> float | None:
        """The share of the work that is done; `pending`: open finalists by problem id. None without work."""
        return max(0.0, 1 - self.left_s(pending) / self._total_s) if self._total_s > 0 else None

    def setup_s(self, problem: str) -> float:
        """The time of a problem's operands and reference."""
        return self._setup_s[problem]

    def left_s(self, pending: Mapping[str, Collection[Candidate]]) -> float:
        """The time of what is open; `pending`: open finalists by problem id."""
        return sum(self._setup_s[name] + self.cost_s(name, candidates) for name, candidates in pending.items())


def _finalist_s(row: Row, cost: FinalsCost, expected_us: float | None) -> float:
    """The expected seconds of a row of the shortlist."""
    time_us, role = _time_us(row["us"], expected_us), row.get("role")
    if role in COMPARED:
        return cost.entry_s(time_us)
    # A library that is slower leaves the race early, also where a present choice runs all rounds.
    return (replace(cost, all_rounds=False) if role == "library" else cost).finalist_s(time_us)


def _time_us(cell: object, otherwise: float | None) -> float | None:
    return float(cell) if isinstance(cell, int | float) and cell == cell else otherwise


_UNSURE = 0.7
"""On a CPU the finals take as long as expected within a factor of 1 + this / sqrt(problems), at most times."""
_LEAST, _LATE, _ROUNDING_S = 0.15, 0.5, 1e-6
"""The share of what was left at the last result, that is left at least; and that of the time by which one is late."""
_USUAL_S = 0.6
"""The usual time of a problem's finals on a CPU with short launches: checks take longer than rounds."""


def unsure_factor(problems: int) -> float:
    """The factor by which the finals of so many problems may be shorter or longer on a CPU."""
    return 1 + _UNSURE / math.sqrt(max(1, problems))


def usual_finals_s(times_us: Sequence[float], setup_s: float = 0.0, orders: int = 1) -> float:
    """The time of a problem's finals on a CPU, in seconds, from those of its candidates, which are few.

    `setup_s`: that of its operands and reference; `orders`: the memory orders in which they are timed. The slowest
    candidates count most: a library without more memory for weights stays in the race.
    """
    if not times_us:
        return max(_USUAL_S, setup_s)
    return setup_s + sum(cpu_finalist_s(us, _USUAL_TIMER, orders) for us in times_us)


class BudgetFit:
    """Shortens the finals of large products to what fits in the rest of a budget for a CPU."""

    def __init__(
        self, budget: CpuBudget, work: FinalsWork, tables: "Mapping[str, pd.DataFrame]", context: Context
    ) -> None:
        self._budget, self._work, self._context = budget, work, context
        self._has_begun = budget.passes > 1
        self._running = ""
        """The id of the problem that is timed."""
        self._done_s, self._done_at = 0.0, time.monotonic()
        """The expected time of the finals that are done, and when the last one was."""
        self._left_out: Counter[str] = Counter()
        """Finalists that were left out, by problem id."""
        self._extra_bytes: dict[tuple[str, str], int] = {}
        """By (problem id, candidate id), from screening; empty for rows of a table, all of which are checked."""
        if "trials" in tables:
            trials = tables["trials"]
            keys = zip(trials["problem"], trials["candidate"], strict=True)
            self._extra_bytes = dict(zip(keys, trials["extra_weight_bytes"].tolist(), strict=True))

    def shorten_next(
        self,
        queue: MutableSequence[Job],
        pending: MutableMapping[str, set[Candidate]],
        libraries: Mapping[str, Collection[str]],
    ) -> None:
        """Shorten the next job of a free worker, or leave it for the next run; the first job of a run is never left.

        `pending`: open finalists by problem id; `libraries`: ids of the candidates that are a library's.
        """
        while queue and not any(map(self._context.pool.backlog, range(len(self._context.pool.devices)))):
            job, problem = queue[0], queue[0].problem.id
            kept = self._within_budget(job, libraries.get(problem, ()))
            if kept:
                self._has_begun, self._running = True, problem
                self._shorten(queue, kept, pending)
                return
            del queue[0]
            self._leave(problem, pending)

    def _within_budget(self, job: Job, libraries: Collection[str]) -> list[Candidate]:
        """The finalists that fit, those first that a selection needs; none if these do not fit."""
        name, left_s = job.problem.id, max(self._budget.finals_left_s, 0.0 if self._has_begun else SHORT_S)
        needed = self._needed(job, libraries)
        kept, spent_s = [*needed], self._work.setup_s(name) + self._work.cost_s(name, needed)
        if self._has_begun and spent_s > left_s:
            return []
        others = [c for c in job.candidates if c not in needed]
        for candidate in sorted(others, key=lambda c: self._work.cost_s(name, [c])):
            spent_s += self._work.cost_s(name, [candidate])
            if spent_s > left_s:
                break
            kept.append(candidate)
        return kept

    def _needed(self, job: Job, libraries: Collection[str]) -> Sequence[Candidate]:
        """The fastest finalist and the fastest library, of those that need the least memory for weights."""
        if not self._extra_bytes:
            return job.candidates
        least = sorted(job.candidates, key=lambda c: self._order(job.problem.id, c))
        return list(dict.fromkeys([*least[:1], *[c for c in least if c.id in libraries][:1]]))

    def _order(self, problem: str, candidate: Candidate) -> tuple[int, float]:
        return self._extra_bytes.get((problem, candidate.id), 0), self._work.cost_s(problem, [candidate])

    def _shorten(
        self, queue: MutableSequence[Job], kept: Collection[Candidate], pending: MutableMapping[str, set[Candidate]]
    ) -> None:
        job, problem = queue[0], queue[0].problem.id
        dropped = [c for c in job.candidates if c not in kept]
        if not dropped:
            return
        self._work.leave_out(problem, dropped)
        queue[0] = job.without(dropped)
        pending[problem].difference_update(dropped)
        self._left_out[problem] += len(dropped)
        self._context.journal.write("cut_short", problem=problem)
        self._context.cut_short.add(problem)

    def leave_late(self, queue: MutableSequence[Job], pending: MutableMapping[str, set[Candidate]]) -> None:
        """Leave the jobs that have not begun when the time for finals is over."""
        if self._budget.finals_left_s > 0:
            return
        for job in queue:
            self._leave(job.problem.id, pending)
        queue.clear()

    def _leave(self, problem: str, pending: MutableMapping[str, set[Candidate]]) -> None:
        self._work.leave_problem(problem, pending.pop(problem))
        self._budget.left.add(problem)

    def run_end(self, pending: Mapping[str, Collection[Candidate]]) -> RunEnd | None:
        """The end of a run that has problems left; None if it has none. `pending`: the open finalists.

        The problems that are left take as long as those of this pass.
        """
        if not self._budget.left:
            return None
        most_s = self.most_s(pending) + self._budget.usually_late_s
        finals_s, spent_s = min(self._left_s(pending), most_s), self._budget.spent_s
        done = max(1, len(self._context.problems) - len(self._budget.left))
        later_s = len(self._budget.left) * (spent_s + finals_s) / done
        return self._budget.run_end(finals_s, unsure_factor(len(pending)), later_s)

    def most_s(self, pending: Mapping[str, Collection[Candidate]]) -> float:
        """Seconds until the budget ends the finals: what has begun before its end is finished."""
        running = {name: candidates for name, candidates in pending.items() if name == self._running}
        return max(self._budget.end_s, self._left_s(pending, self._work.left_s(running)))

    def _left_s(self, pending: Mapping[str, Collection[Candidate]], expected_s: float | None = None) -> float:
        """Seconds of the open finals, or of those with this expected time, at the pace of the finals so far."""
        now, open_s = time.monotonic(), self._work.left_s(pending)
        done_s = self._work.total_s - open_s
        if done_s > self._done_s + _ROUNDING_S:
            self._budget.take_finals(done_s - self._done_s, now - self._done_at)
            self._done_s, self._done_at = done_s, now
        left_s, spent_s = self._budget.finals_pace * (open_s if expected_s is None else expected_s), now - self._done_at
        return max(left_s - spent_s, _LEAST * left_s, min(left_s, _LATE * (spent_s - left_s)))

    def line(self) -> str:
        """The line about finalists that were left out of the finals; empty if there are none."""
        if not self._left_out:
            return ""
        number, problems = sum(self._left_out.values()), len(self._left_out)
        return (
            f"bench: cpu_budget_s={self._budget.limit_s:g} left {counted(number, 'finalist')} of "
            f"{counted(problems, 'problem')} untimed; {verb(problems, 'its row is', 'their rows are')} provisional"
        )
