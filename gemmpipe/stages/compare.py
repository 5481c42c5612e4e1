"""The compare stage: the times of the lineup side by side, against the floor of the hardware, as CSV and plot."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.backends.same_size import EMPTY, SameSize
from gemmpipe.data import Problem, median
from gemmpipe.errors import at_least
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.lineup import OWN, TUNED
from gemmpipe.stages.paired import paired_ratio
from gemmpipe.stages.plotting import plot
from gemmpipe.stages.rows import problems_of

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = (
    "problem",
    "M",
    "N",
    "K",
    "name",
    "libtype",
    "config",
    "status",
    "us",
    "p20_us",
    "p80_us",
    "floor_us",
    "over_floor",
    "ratio_to_tuned",
    "error",
)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What an architecture reaches at most: bytes and operations a second, by the width of the operands."""

    bytes_per_s: float
    flops_8_per_s: float
    flops_16_per_s: float

    def __post_init__(self) -> None:
        at_least(
            1.0, bytes_per_s=self.bytes_per_s, flops_8_per_s=self.flops_8_per_s, flops_16_per_s=self.flops_16_per_s
        )


@dataclass(frozen=True, kw_only=True)
class Compare(Stage):
    """`compared` has a row for each problem and name; the floor is max(bytes, operations) at `rates` + a launch."""

    rates: Mapping[str, Rates]
    """By architecture; without an entry there is no floor."""
    regimes: tuple[int, ...]
    """The largest Ms of the summary's rows; the last row is the rest."""
    against: str | None
    """Who the own kernels are held against in the summary; None: on each problem the fastest library path."""
    plot: bool

    needs: ClassVar[tuple[str, ...]] = ("problems", "lineup", "trials")
    gives: ClassVar[tuple[str, ...]] = ("compared",)

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """The table, a summary in words, and compare.html beside them."""
        import pandas as pd

        finals = tables["trials"][tables["trials"]["stage"] == "bench"].to_dict("records")
        trials = {(str(t["problem"]), str(t["candidate"])): t for t in finals}
        rows: list[dict[str, object]] = []
        for problem in problems_of(context.family, tables["problems"]):
            lineup = tables["lineup"][tables["lineup"]["problem"] == problem.id].to_dict("records")
            named = {str(e["name"]): trials[problem.id, str(e["candidate"])] for e in lineup}
            rows += self._rows(problem, named, context)  # type: ignore[arg-type]
        compared = pd.DataFrame(rows, columns=list(_COLUMNS))
        for line in summary(compared, self.regimes, self.against, context.family.baseline):
            context.events.emit("line", line)
        if self.plot:
            path = plot(compared, context.run_dir / "compare.html", context.device.name)
            context.events.emit("line", f"compare: {path}")
        return {"compared": compared}

    def _rows(
        self, problem: Problem, named: Mapping[str, Mapping[str, object]], context: Context
    ) -> list[dict[str, object]]:
        launch_us = _time(named.get(f"{SameSize.label} {EMPTY}"))
        floor_us = self._floor_us(problem, launch_us, context)
        tuned = named.get(TUNED)
        spec = context.family.spec(problem)
        rows = []
        for name, trial in named.items():
            us = _time(trial)
            both = tuned is not None and us is not None and _time(tuned) is not None
            ratio = paired_ratio(_samples(trial), _samples(tuned)).median if both and tuned else None
            rows.append(
                {
                    "problem": problem.id,
                    "M": spec.m,
                    "N": spec.n,
                    "K": spec.k,
                    "name": name,
                    **{c: trial[c] for c in ("libtype", "config", "status", "p20_us", "p80_us", "error")},
                    "us": us,
                    "floor_us": floor_us,
                    "over_floor": us / floor_us if us is not None and floor_us else None,
                    "ratio_to_tuned": ratio,
                }
            )
        return rows

    def _floor_us(self, problem: Problem, launch_us: float | None, context: Context) -> float | None:
        rates = self.rates.get(context.device.gfx)
        if rates is None or launch_us is None:
            return None
        spec = context.family.spec(problem)
        narrow = "8" in spec.w_dtype
        flops = rates.flops_8_per_s if narrow else rates.flops_16_per_s
        bound_s = max(
            context.family.bytes_moved(spec) / rates.bytes_per_s,
            context.family.flops(spec) / flops,
        )
        return bound_s * 1e6 + launch_us


def _time(trial: Mapping[str, object] | None) -> float | None:
    us = trial["us"] if trial is not None else None
    return None if us is None or us != us else float(str(us))


def _samples(trial: Mapping[str, object]) -> Sequence[float]:
    return tuple(trial["samples_us"])  # type: ignore[arg-type]


def summary(
    compared: "pd.DataFrame", regimes: Sequence[int], against: str | None, libraries: Sequence[str]
) -> list[str]:
    """By regime of M: own kernels against one path, and what is chosen against the floor; geomean (least, most)."""
    lines = [f"{'regime':16} {'own against ' + (against or 'libraries'):60} tuned over the floor"]
    low = 0
    for high in (*regimes, None):
        part = compared[(compared["M"] > low) & (compared["M"] <= (high or math.inf))]
        label = f"{low} < M <= {high}" if high else f"M > {low}"
        low = high or low
        times = {
            name: dict(zip(rows["problem"], rows["us"], strict=True)) for name, rows in part.groupby("name", sort=False)
        }
        own = times.get(OWN, {})
        fastest = part[part["libtype"].isin(libraries)].groupby("problem")["us"].min().to_dict()
        other = times.get(against, {}) if against else fastest
        ratios = [other[p] / own[p] for p in own if p in other and own[p] > 0 and other[p] > 0]
        floors = [float(x) for x in part.loc[part["name"] == TUNED, "over_floor"] if x is not None and x == x]
        if ratios or floors:
            lines.append(f"{label:16} {_spread(ratios):60} {_spread(floors)}")
    return lines


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = math.exp(sum(map(math.log, values)) / len(values))
    return f"{mean:.3f} ({min(values):.3f} to {max(values):.3f}, {len(values)} problems, median {median(values):.3f})"
