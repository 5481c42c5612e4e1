"""The compare stage: the times of the lineup and the floor of the hardware, as a table and a page."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe import journal
from gemmpipe.backends.same_size import BLOCKWISE, EMPTY, SameSize
from gemmpipe.bench.timer import paired_ratio
from gemmpipe.core.data import FINALS, Device, Problem, Status
from gemmpipe.core.errors import UserError
from gemmpipe.core.events import counted
from gemmpipe.core.files import read_object
from gemmpipe.core.text_table import terminal_width
from gemmpipe.family.roofline import find_roofline, floor_us
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.compare import summary as regimes
from gemmpipe.stages.compare.baseline import check_entries, check_label
from gemmpipe.stages.compare.choices import with_fastest
from gemmpipe.stages.compare.entries import NAMES, OWN, TUNED
from gemmpipe.stages.compare.plot import plot
from gemmpipe.stages.rows import TrialRow, row_samples_us, row_time_us, trials_by_candidate
from gemmpipe.stages.selections import policy_of_times
from gemmpipe.tables.merge import shared_policy

if TYPE_CHECKING:
    import pandas as pd


COMPARED = (
    "problem",
    "M",
    "N",
    "K",
    "name",
    "unlike",
    "libtype",
    "library",
    "peer",
    "config",
    "status",
    "us",
    "p20_us",
    "p80_us",
    "full_clocks_us",
    "floor_us",
    "over_floor",
    "over_tuned",
    "over_own",
    "tuning_s",
    "tried",
    "of",
    "compiled",
    "extra_weight_bytes",
    "fastest",
    "condition",
    "policy",
    "error",
)
"""The columns of `compared`; `over_tuned` and `over_own` are ratios paired by round."""
_FROM_TRIAL = ("libtype", "config", "status", "p20_us", "p80_us", "full_clocks_us", "extra_weight_bytes", "error")
_BLOCKWISE = f"{SameSize.label} {BLOCKWISE}"


@dataclass(frozen=True, kw_only=True)
class Compare(Stage):
    """Gives `compared`, a row per problem and name; the floor is that of the device's roofline."""

    regimes: tuple[int, ...]
    """The largest M of each regime of the summary; one more regime has the larger Ms."""
    baseline: str | None
    """The entry to compare own kernels with in the summary; None: the fastest library path on each problem."""
    plot: bool

    needs: ClassVar[tuple[str, ...]] = ("problems", "lineup", "trials")
    gives: ClassVar[tuple[str, ...]] = ("compared", "regimes")
    accumulates: ClassVar[tuple[str, ...]] = ("problems", "lineup", "trials")  # a summary is of the whole run

    def check(self, context: Context) -> None:
        """Raises UserError for a baseline that no entry can have as its name; the lineup checks the rest of it."""
        if self.baseline is not None:
            check_label(self.baseline, {i.label for i in context.implementations})
            context.entry_checks.append(partial(check_entries, self.baseline, context))

    def usual_s(self, device: Device) -> float:
        """With the page and the tables of the run: 0.7 and 0.9 s for 56 and 112 problems (H100, H200, 2026-11)."""
        return 0.01

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns the table and its summary, and writes compare.html into the folder of the run."""
        import pandas as pd

        trials = trials_by_candidate(tables["trials"][tables["trials"]["stage"] == FINALS])
        lineup = {str(name): part.to_dict("records") for name, part in tables["lineup"].groupby("problem", sort=False)}
        rows: list[dict[str, object]] = []
        for problem in context.problems:
            entries: list[TrialRow] = lineup.get(problem.id, [])  # type: ignore[assignment]
            rows += self._rows(problem, entries, trials, context)
        compared = with_fastest(pd.DataFrame(rows, columns=list(COMPARED)))
        _note_untimed(compared, context)
        summary = regimes.summarize(compared, self.regimes)
        if (text := regimes.shared_line(compared)) and shared_policy(context.device.kind) not in context.policy:
            context.events.emit("warning", f"{text}; compare again on an idle machine")
        context.final_lines[:] = regimes.lines(compared, summary, self.baseline, terminal_width())
        roofline = find_roofline(context.device.gfx, context.device.name, context.rooflines)
        if roofline is not None and not roofline.measured:
            context.final_lines.append("floor  its rates are derived from a specification, not measured")
        context.final_lines.extend(_tuning_cost_lines(tables["lineup"], context.run_dir.parent.parent))
        if self.plot:
            path = plot(compared, context.run_dir / "compare.html", context.device.name, summary)
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
        launch_us = row_time_us(named.get(f"{SameSize.label} {EMPTY}"))
        floor = floor_us(
            context.device.gfx,
            context.family,
            problem,
            device=context.device.name,
            launch_us=launch_us,
            rooflines=context.rooflines,
        )
        spec = context.family.spec(problem)
        cells = {"problem": problem.id, "M": spec.m, "N": spec.n, "K": spec.k, "floor_us": floor}
        rows = []
        for entry in entries:
            name, trial = str(entry["name"]), named[str(entry["name"])]
            us = row_time_us(trial)
            library = trial is not None and _is_library(name, trial, context)
            kinds = {"unlike": entry["unlike"], "library": library, "peer": _is_peer(entry, trial)}
            result = {c: trial[c] for c in _FROM_TRIAL} if trial is not None else _missing_cells(entry)
            policy = _policy(problem, trial, context) if trial is not None and us is not None else ""
            result |= {"policy": policy, "condition": entry["condition"]}
            cost = {"tuning_s": entry["seconds"], **{c: entry[c] for c in ("tried", "of", "compiled")}}
            over = {"over_tuned": _ratio(trial, named.get(TUNED)), "over_own": _ratio(trial, named.get(OWN))}
            over["over_floor"] = us / floor if us is not None and floor else None
            rows.append({**cells, "name": name, **kinds, "us": us} | result | over | cost)
        return rows


def _policy(problem: Problem, trial: TrialRow, context: Context) -> str:
    """How an entry was timed, in the words of the tables' rows."""
    no_dependent = trial["no_dependent_launch"] is True
    policy = policy_of_times(context.policy, context.family, [problem], no_dependent=no_dependent)
    shared = shared_policy(context.device.kind)
    return f"{policy} {shared}" if trial["shared"] is True and shared not in policy else policy


def _note_untimed(compared: "pd.DataFrame", context: Context) -> None:
    """The problems of a comparison that has no time at all are unsolved."""
    mine = {problem.id for problem in context.problems}
    earlier = [name for name in context.unsolved if name not in mine]  # a batch before may have had no time
    context.unsolved[:] = earlier if compared["us"].notna().any() else [*earlier, *(p.id for p in context.problems)]


def _tuning_cost_lines(lineup: "pd.DataFrame", runs: Path) -> Iterator[str]:
    """A line about each run that chose a compared entry, with its duration from the manifest."""
    chosen = lineup[(lineup["name"] == TUNED) & (lineup["run_id"] != "")]
    for run_id, part in chosen.groupby("run_id", sort=False):
        for manifest in sorted(runs.glob(f"*/{run_id}/manifest.json"))[:1]:
            folder, took_s = manifest.parent, _wall_s(manifest)
            if took_s is not None:
                duration = f"which took {took_s:.0f} s for {counted(_problem_count(folder), 'problem')}"
                yield f"tuned: {counted(len(part), 'choice')} of {folder}, {duration}"


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


def _is_peer(entry: TrialRow, trial: TrialRow | None) -> bool:
    """True for a path by others that computes this product without extra weight memory."""
    return trial is not None and entry["name"] not in NAMES and not entry["unlike"] and not trial["extra_weight_bytes"]


def _missing_cells(entry: TrialRow) -> dict[str, object]:
    """The cells of an entry that is excluded, or has no trial."""
    return {"status": str(Status.UNSUPPORTED), "error": entry["reason"] or "not timed"}


def _ratio(trial: TrialRow | None, other: TrialRow | None) -> float | None:
    """The ratio of two times, paired by round; None where either is missing."""
    if trial is None or other is None or row_time_us(trial) is None or row_time_us(other) is None:
        return None
    return paired_ratio(row_samples_us(trial), row_samples_us(other)).median
