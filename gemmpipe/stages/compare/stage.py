"""The compare stage: the times of the lineup and the floor of the hardware, as a table and a plot of time over M."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe import journal
from gemmpipe.backends.same_size import BLOCKWISE, EMPTY, SameSize
from gemmpipe.bench.timer import paired_ratio
from gemmpipe.core.data import Problem, Status
from gemmpipe.core.errors import UserError, check_at_least, suggest_or_list
from gemmpipe.core.files import read_object
from gemmpipe.core.paths import write_atomic
from gemmpipe.stages import FINALS, Context, Stage
from gemmpipe.stages.compare import summary as regimes
from gemmpipe.stages.compare.entries import NAMES, OWN, TUNED
from gemmpipe.stages.rows import TrialRow, row_samples_us, row_time_us, trials_by_candidate

if TYPE_CHECKING:
    import pandas as pd


_PANEL_PX = 420
_COLUMNS = 2
_FLOOR = "floor"


def plot(compared: "pd.DataFrame", path: Path, device: str) -> Path:
    """Writes a self-contained HTML file, a panel per product with a line per name and one for the floor; log axes.

    Raises UserError where plotly is missing.
    """
    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise UserError("stages.compare.plot=true needs plotly: pip install 'gemmpipe[plot]'") from None
    products = list(compared.groupby(["N", "K"], sort=False))
    rows = -(-len(products) // _COLUMNS) or 1
    titles = [f"N={n} K={k}" for (n, k), _ in products]
    figure = make_subplots(rows=rows, cols=_COLUMNS, subplot_titles=titles)
    labels = _labels(compared)
    shown: set[str] = set()
    for index, (_, part) in enumerate(products):
        for name, line in _lines(part):
            legend = {"name": labels.get(name, name), "legendgroup": name, "showlegend": name not in shown}
            style = {"mode": "lines+markers", "line": {"dash": "dash" if name == _FLOOR else "solid"}}
            panel = {"row": index // _COLUMNS + 1, "col": index % _COLUMNS + 1}
            figure.add_scatter(x=line.index, y=line, **legend, **style, **panel)
            shown.add(name)
    figure.update_xaxes(type="log", title_text="M")
    figure.update_yaxes(type="log", title_text="us")
    figure.update_layout(height=_PANEL_PX * rows, title=f"Time over M on {device}")
    write_atomic(path, figure.to_html(include_plotlyjs=True))
    return path


def _labels(compared: "pd.DataFrame") -> dict[str, str]:
    """Legend labels by name, for entries chosen by a tuner in measured time."""
    tuning_s = compared.groupby("name", sort=False)["tuning_s"].sum()
    return {str(name): f"{name} (chosen in {spent_s:.0f} s)" for name, spent_s in tuning_s.items() if spent_s}


def _lines(part: "pd.DataFrame") -> Iterator[tuple[str, "pd.Series[float]"]]:
    """Yields each name of a product with its times in us by M, ascending; the floor last."""
    timed = [(str(name), line.set_index("M")["us"]) for name, line in part.groupby("name", sort=False)]
    floor = part.dropna(subset=["floor_us"]).drop_duplicates("M").set_index("M")["floor_us"]
    for name, line in [*timed, (_FLOOR, floor)]:
        if len(found := line.dropna().sort_index()):
            yield name, found


COMPARED = (
    "problem",
    "M",
    "N",
    "K",
    "name",
    "unlike",
    "libtype",
    "library",
    "config",
    "status",
    "us",
    "p20_us",
    "p80_us",
    "floor_us",
    "over_floor",
    "over_tuned",
    "over_own",
    "tuning_s",
    "tried",
    "of",
    "compiled",
    "error",
)
"""The columns of `compared`; `over_tuned` and `over_own` are ratios paired by round."""
_FROM_TRIAL = ("libtype", "config", "status", "p20_us", "p80_us", "error")
_BLOCKWISE = f"{SameSize.label} {BLOCKWISE}"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Peak rates of an architecture: bytes and operations per second, the latter by the width of the operands."""

    bytes_per_s: float
    flops_8_per_s: float
    flops_16_per_s: float

    def __post_init__(self) -> None:
        check_at_least(
            1.0, bytes_per_s=self.bytes_per_s, flops_8_per_s=self.flops_8_per_s, flops_16_per_s=self.flops_16_per_s
        )


@dataclass(frozen=True, kw_only=True)
class Compare(Stage):
    """Gives `compared`, a row per problem and name; the floor is max(bytes, operations) at `rates` plus a launch."""

    rates: Mapping[str, Rates]
    """By architecture; without an entry there is no floor."""
    regimes: tuple[int, ...]
    """The largest M of each regime of the summary; one more regime has the larger Ms."""
    baseline: str | None
    """The entry to compare own kernels with in the summary; None: the fastest library path on each problem."""
    plot: bool

    needs: ClassVar[tuple[str, ...]] = ("problems", "lineup", "trials")
    gives: ClassVar[tuple[str, ...]] = ("compared", "regimes")
    accumulates: ClassVar[tuple[str, ...]] = ("problems", "lineup", "trials")  # a summary is of the whole run

    def check(self, context: Context) -> None:
        """Raises UserError for a baseline that no entry can have as its name."""
        known = {*NAMES, regimes.LIBRARY, *(i.label for i in context.implementations)}
        if self.baseline is not None and not {self.baseline, self.baseline.partition(" ")[0]} & known:
            raise UserError(
                f"stages.compare.baseline: no entry named '{self.baseline}'{suggest_or_list(self.baseline, known)}"
            )

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns the table and its summary, and writes compare.html into the folder of the run."""
        import pandas as pd

        trials = trials_by_candidate(tables["trials"][tables["trials"]["stage"] == FINALS])
        lineup = {str(name): part.to_dict("records") for name, part in tables["lineup"].groupby("problem", sort=False)}
        rows: list[dict[str, object]] = []
        for problem in context.problems:
            entries: list[TrialRow] = lineup.get(problem.id, [])  # type: ignore[assignment]
            rows += self._rows(problem, entries, trials, context)
        compared = pd.DataFrame(rows, columns=list(COMPARED))
        summary = regimes.summarize(compared, self.regimes)
        context.final_lines[:] = regimes.lines(compared, summary, self.baseline)
        context.final_lines.extend(_tuning_cost_lines(tables["lineup"], context.run_dir.parent.parent))
        if self.plot:
            path = plot(compared, context.run_dir / "compare.html", context.device.name)
            context.final_lines.append(f"plot  {path}")
        return {"compared": compared, "regimes": summary}

    def _rows(
        self,
        problem: Problem,
        entries: Sequence[TrialRow],
        trials: Mapping[tuple[str, str], TrialRow],
        context: Context,
    ) -> list[dict[str, object]]:
        named = {str(e["name"]): trials.get((problem.id, str(e["candidate"]))) for e in entries}
        floor_us = self._floor_us(problem, row_time_us(named.get(f"{SameSize.label} {EMPTY}")), context)
        spec = context.family.spec(problem)
        cells = {"problem": problem.id, "M": spec.m, "N": spec.n, "K": spec.k, "floor_us": floor_us}
        rows = []
        for entry in entries:
            name, trial = str(entry["name"]), named[str(entry["name"])]
            us = row_time_us(trial)
            library = trial is not None and _is_library(name, trial, context)
            result = {c: trial[c] for c in _FROM_TRIAL} if trial is not None else _missing_cells(entry)
            cost = {"tuning_s": entry["seconds"], **{c: entry[c] for c in ("tried", "of", "compiled")}}
            over = {"over_tuned": _ratio(trial, named.get(TUNED)), "over_own": _ratio(trial, named.get(OWN))}
            over["over_floor"] = us / floor_us if us is not None and floor_us else None
            rows.append(
                {**cells, "name": name, "unlike": entry["unlike"], "library": library, "us": us} | result | over | cost
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


def _tuning_cost_lines(lineup: "pd.DataFrame", runs: Path) -> Iterator[str]:
    """A line about each run that chose a compared entry, with its duration from the manifest."""
    chosen = lineup[(lineup["name"] == TUNED) & (lineup["run_id"] != "")]
    for run_id, part in chosen.groupby("run_id", sort=False):
        for manifest in sorted(runs.glob(f"*/{run_id}/manifest.json"))[:1]:
            folder, took_s = manifest.parent, _wall_s(manifest)
            if took_s is not None:
                duration = f"which took {took_s:.0f} s for {_problem_count(folder)} problems"
                yield f"tuned: {len(part)} chosen by {folder}, {duration}"


def _wall_s(manifest: Path) -> float | None:
    """The duration in a manifest; None where it is missing, as the comparison does not depend on it."""
    with suppress(UserError):
        wall_s = read_object(manifest, limit=1 << 26).get("wall_s")
        return float(wall_s) if isinstance(wall_s, int | float) else None
    return None


def _problem_count(folder: Path) -> int:
    """The number of problems in a run's journal."""
    return len({row["id"] for row in journal.read(folder).problems})


def _is_library(name: str, trial: TrialRow, context: Context) -> bool:
    """True for a library path that computes this product without extra weight memory."""
    path = name == _BLOCKWISE or trial["libtype"] in context.family.baseline
    return path and not trial["extra_weight_bytes"]


def _missing_cells(entry: TrialRow) -> dict[str, object]:
    """The cells of an entry that is excluded, or has no trial."""
    return {"status": str(Status.UNSUPPORTED), "error": entry["reason"] or "not timed"}


def _ratio(trial: TrialRow | None, other: TrialRow | None) -> float | None:
    """The ratio of two times, paired by round; None where either is missing."""
    if trial is None or other is None or row_time_us(trial) is None or row_time_us(other) is None:
        return None
    return paired_ratio(row_samples_us(trial), row_samples_us(other)).median
