"""The expected seconds of what follows the screening of an engine's function: compiling and the finals of all its Ms.

Finals have more Ms than the screening: those between two keys, from which further keys are chosen. Their number is
known before the screening, and their times from those of the nearest keys.
"""

from collections.abc import Mapping, Sequence

from gemmpipe.core.data import Problem
from gemmpipe.formats.engine_json import nearest_key
from gemmpipe.stages import Context
from gemmpipe.stages.bench import Bench
from gemmpipe.stages.engine.files import EngineShapeGroup, problem_at_m
from gemmpipe.stages.finals_cost import ExpectedFinal, expected_s

NEIGHBOURS = 4  # finalists of each neighbouring key, timed at an M that another key serves

_MOST_COMPILE_PROCESSES = 16  # each imports an engine: seconds and a gigabyte
# Seconds until an engine's own functions are compiled: 40 to 58 on 16 cores (H200, 2026-11-24); on 32 cores 31 with 34
# calls in each process, 39 with 92 (H100, 2026-11-25).
_IMPORT_S, _CALL_S = 30.0, 0.15
_LATE = 0.1  # of the time so far, that is left of compiling that takes longer than expected


def compile_processes(context: Context) -> int:
    """The number of processes that compile an engine's kernels."""
    return max(1, min(_MOST_COMPILE_PROCESSES, context.pool.compile_slots))


def compile_seconds(calls: int) -> float:
    """The expected time of a process that compiles so many calls."""
    return _IMPORT_S + _CALL_S * calls


def compiled_share(spent_s: float, expected_s: float, left: float) -> float:
    """The share of the compiling that is done, by time; `left`: the share of the processes that still run.

    These have about equal work, so that none ends before most of the time is over.
    """
    if left <= 0:
        return 1.0
    left_s = max(expected_s - spent_s, _LATE * spent_s) * left
    return spent_s / (spent_s + left_s)


class AfterScreening:
    """The work after the screening of one engine's function."""

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[Problem], EngineShapeGroup]],
        bench: Bench,
        *,
        keep: int,
        compiles: bool,
        context: Context,
    ) -> None:
        """`groups`: the problems of each product with its configurations; `keep`: the finalists of a key.

        `compiles`: the engine's own function is timed, whose kernels are compiled before.
        """
        self._usual_s, self._devices = bench.usual_s(context.device), len(context.pool.devices)
        self.screened = [problem for group, _ in groups for problem in group]
        self._finals: list[ExpectedFinal] = []
        for group, product in groups:
            keys = {problem.rows: problem for problem in group}
            for m in product.grid.timed_ms:
                nearest = keys[nearest_key(sorted(keys), m)]
                present = len(product.current_and_default(m))
                others = 0 if m in keys else NEIGHBOURS * (len(product.grid.adjacent(m)) - 1)
                problem = keys[m] if m in keys else problem_at_m(context.family, group[0], m)
                cost = bench.cost(problem, context, all_rounds=present > 0)
                # Half of the others are finalists of the nearest key, or the engine's, as well.
                self._finals.append(
                    ExpectedFinal(screened=nearest.id, finalists=keep + (present + others) // 2, cost=cost)
                )
        calls = sum(final.finalists for final in self._finals) // compile_processes(context)
        self._compile_s = compile_seconds(calls) if compiles else 0.0

    @property
    def finals(self) -> int:
        """The number of problems in the finals."""
        return len(self._finals)

    def finals_s(self, fastest_us: Mapping[str, float]) -> float:
        """The seconds of the finals; `fastest_us`: by problem id, the fastest time in the screening."""
        return expected_s(self._finals, fastest_us, self._usual_s) / self._devices

    def seconds(self, fastest_us: Mapping[str, float]) -> float:
        """The seconds of the compiling and of the finals."""
        return self._compile_s + self.finals_s(fastest_us)
