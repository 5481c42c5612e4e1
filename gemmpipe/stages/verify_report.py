"""The verify_report stage: which rows of a tuned table hold on this machine, and the overhead of their calls."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.bench.timer import PairedRatio, paired_ratio
from gemmpipe.core import schema
from gemmpipe.core.data import TIMED, Status
from gemmpipe.core.errors import check_at_least
from gemmpipe.core.events import counted, verb
from gemmpipe.core.shell import shell_join
from gemmpipe.core.units import time_text
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.load import CANNOT_RUN
from gemmpipe.stages.rows import row_samples_us
from gemmpipe.stages.selections import policy_of_times
from gemmpipe.tables.merge import SHARED_CPU, SHARED_GPU, is_provisional

if TYPE_CHECKING:
    import pandas as pd


CallRow = Mapping[str, object]
_SURE_ON_A_SHARED_DEVICE = 1.5
"""Rounds that other processes disturb differ by tens of percent, in one direction too."""
_LEAST_ROUNDS_ON_A_SHARED_DEVICE = 3  # a single disturbed sample was 20 times the time (2 cores of a CPU)


def worst_calls(called: "pd.DataFrame | None") -> dict[tuple[str, str], CallRow]:
    """By problem and candidate, the row of the layout with the largest overhead, or the row with the error."""
    found: dict[tuple[str, str], CallRow] = {}
    for row in called.to_dict("records") if called is not None else ():
        key = str(row["problem"]), str(row["candidate"])
        if key not in found or _cost(row) > _cost(found[key]):  # type: ignore[arg-type]
            found[key] = row  # type: ignore[assignment]
    return found


def _cost(row: CallRow) -> float:
    return math.inf if row["called_error"] else float(str(row["called_ratio"]))


def call_overhead(call: CallRow, function: str, max_overhead_pct: float | None) -> str:
    """The overhead of a call over the bare launch as text, if it is more than allowed; else an empty string.

    `max_overhead_pct`: percent of the launch; None allows anything. The paired interval must exclude 1.
    """
    ratio, low = float(str(call["called_ratio"])), float(str(call["called_low"]))
    if max_overhead_pct is None or ratio <= 1 + max_overhead_pct / 100 or low <= 1:
        return ""
    called_us, bound_us = float(str(call["called_us"])), float(str(call["bound_us"]))
    layout = " with M-major x_scale" if call["layout"] == "column" else ""
    return (
        f"{function}{layout} takes {time_text(called_us)}, {time_text(called_us - bound_us)} more than the launch "
        f"(+{100 * (ratio - 1):.1f} %, {max_overhead_pct:g} allowed)"
    )


def calls_summary(rows: Sequence[CallRow], max_overhead_pct: float | None) -> str:
    """`; calls: 71 of 72 within 3 % of their launch (98.6 %), +5.1 % at most`; empty where no call was timed."""
    ratios = [float(str(row["called_ratio"])) for row in rows if row.get("called_ratio") is not None]
    if not ratios:
        return ""
    worst = f"{100 * (max(ratios) - 1):+.1f} %"
    if max_overhead_pct is None:
        return f"; calls: at most {worst} over their launch"
    within = sum(ratio <= 1 + max_overhead_pct / 100 for ratio in ratios)
    share = 100 * within / len(ratios)
    near = f"{within} of {len(ratios)} within {max_overhead_pct:g} % of their launch"
    return f"; calls: {near} ({share:.1f} %), {worst} at most"


HOLDS, NOT_COMPARED, STALE, NOT_RUN = "holds", "not compared", "stale", "cannot run here"
"""Verdicts. A row that is not compared is correct and not behind a library; its recorded time is of another kind. Of a
row that cannot run here nothing is known: its library is not installed, or does not run on this device."""
_MOST_LINES = 200
_OPTIONS = {"ck": "aiter", "asm": "aiter", "vllm": "engine_pairs", "sglang": "engine_pairs"}
"""Options of `backend=` with another name than the libraries' labels."""


@dataclass(frozen=True, kw_only=True)
class VerifyReport(Stage):
    """A row holds when its winner is correct, at most `max_drift_pct` slower than recorded, and not behind a library.

    A recorded time that was taken otherwise than here (policy, device, other processes) is not compared: the row is
    counted apart, unless it is stale for another reason.
    Behind a library: slower than the fastest one by more than `max_behind_pct`, paired by round, in an interval that
    excludes 1. Where calls were timed (stage verify_calls), a call through the runtime must take at most
    `max_call_overhead_pct` more than the launch itself, in its worse layout of x's scales; None: no limit. No limit
    applies on a CPU, where a call has no graph and contains the time of Python.
    """

    max_drift_pct: float
    max_behind_pct: float
    max_call_overhead_pct: float | None

    needs: ClassVar[tuple[str, ...]] = ("selections", "trials")
    gives: ClassVar[tuple[str, ...]] = ("verified", "stale")

    def __post_init__(self) -> None:
        check_at_least(
            0,
            max_drift_pct=self.max_drift_pct,
            max_behind_pct=self.max_behind_pct,
            max_call_overhead_pct=self.max_call_overhead_pct,
        )

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns `verified` (`schema.VERIFIED`), a row per row of the table, and `stale`, problems to tune again."""
        import pandas as pd

        finals = tables["trials"][tables["trials"]["stage"] == "bench"]
        by_problem = {str(name): trials.to_dict("records") for name, trials in finals.groupby("problem", sort=False)}
        calls = worst_calls(tables.get("called"))
        rows: list[dict[str, object]] = []
        for recorded in tables["selections"].to_dict("records"):
            trials = by_problem.get(str(recorded["problem"]), [])
            verified = self._verify_row(recorded, trials, context)  # type: ignore[arg-type]
            call = calls.get((str(recorded["problem"]), str(recorded["candidate"])))
            rows.append(self._with_call(verified, call, context))
        stale = [row for row in rows if row["verdict"] == STALE]
        context.unsolved.extend([str(row["problem"]) for row in stale if row["problem"] not in context.unsolved])
        for row in stale[:_MOST_LINES]:
            context.events.emit("line", f"stale: {row['place']}: {row['problem']}: {row['reason']}")
        most = None if context.device.kind == "cpu" else self.max_call_overhead_pct
        context.events.emit("line", _summary(rows, self.max_drift_pct) + calls_summary(rows, most))
        for line in _not_compared_lines(rows):
            context.events.emit("line", line)
        if stale:
            context.events.emit("line", f"verify: to tune these again: {_retune_command(stale, context)}")
        keys = [column.name for column in context.family.key_columns]
        lost = {str(row["problem"]) for row in stale}
        selected = tables["selections"]
        return {
            "verified": pd.DataFrame(rows, columns=list(schema.VERIFIED)),
            "stale": selected.loc[selected["problem"].isin(lost), ["problem", *keys]].drop_duplicates("problem"),
        }

    def _verify_row(
        self, row: Mapping[str, object], trials: Sequence[Mapping[str, object]], context: Context
    ) -> dict[str, object]:
        """One row of `verified`."""
        own = next((t for t in trials if t["candidate"] == row["candidate"]), None)
        timed = [t for t in trials if t["status"] in TIMED]
        cells = {name: row.get(name) for name in ("problem", "place", "libtype", "config", "kernelName")}
        cells |= {"recorded_us": row.get("us")}
        if own is None or own["status"] not in TIMED:
            reason = str(row["reason"]) or _failure(own)
            if reason.startswith(CANNOT_RUN):
                return cells | {"verdict": NOT_RUN, "reason": reason.removeprefix(CANNOT_RUN)}
            return cells | {"verdict": STALE, "reason": reason}
        library = _baseline(own, timed, context)
        ratio = paired_ratio(row_samples_us(own), row_samples_us(library)) if library else None
        no_dependent = own.get("no_dependent_launch") is True
        timed_problems = [problem for problem in context.problems if problem.id == row["problem"]]
        policy = policy_of_times(context.policy, context.family, timed_problems, no_dependent=no_dependent)
        why = why_not_compared(row, own, policy, context.device.name)
        drift = None if why else float(str(own["us"])) / float(str(row["us"]))
        cells |= {"us": own["us"], "drift": drift, "baseline": library["kernelName"] if library else None}
        cells |= {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high} if ratio else {}
        reason = self._slower(own, row, drift) or self._behind(own, ratio, library)
        return cells | {"verdict": STALE if reason else NOT_COMPARED if why else HOLDS, "reason": reason or why}

    def _with_call(
        self, verified: dict[str, object], call: Mapping[str, object] | None, context: Context
    ) -> dict[str, object]:
        """The row of `verified` with its call's times; a row with too much overhead becomes stale."""
        if call is None:
            return verified
        reason = call["called_error"]
        if not reason:
            verified = {**verified, "called_layout": call["layout"]}
            verified |= {name: call[name] for name in ("called_us", "called_ratio", "called_low", "called_high")}
            # A CPU has no graphs: a call there contains the time of Python, which no tuning removes.
            most = None if context.device.kind == "cpu" else self.max_call_overhead_pct
            reason = call_overhead(call, context.family.entry_point, most)
        if not reason or verified["verdict"] == STALE:
            return verified
        return {**verified, "verdict": STALE, "reason": f"called: {reason}"}

    def _slower(self, own: Mapping[str, object], row: Mapping[str, object], drift: float | None) -> str:
        if drift is None or drift <= 1 + self.max_drift_pct / 100:
            return ""
        percent = 100 * (drift - 1)
        now, recorded = (time_text(float(str(each["us"]))) for each in (own, row))
        return f"slower: {now}, {recorded} recorded (+{percent:.0f} %, {self.max_drift_pct:g} allowed)"

    def _behind(
        self, own: Mapping[str, object], ratio: PairedRatio | None, library: Mapping[str, object] | None
    ) -> str:
        """How far a library is ahead, if more than allowed and for sure; else an empty string."""
        is_shared = own.get("shared") is True
        if is_shared and len(row_samples_us(own)) < _LEAST_ROUNDS_ON_A_SHARED_DEVICE:
            return ""
        least = _SURE_ON_A_SHARED_DEVICE if is_shared else 1.0
        if ratio is None or library is None or ratio.low <= least or ratio.median <= 1 + self.max_behind_pct / 100:
            return ""
        percent = 100 * (1 - 1 / ratio.median)
        takes, taken = (time_text(float(str(each["us"]))) for each in (library, own))
        return f"behind: {_library_text(library)} takes {takes}, {percent:.1f} % less than the row's {taken}"


def _library_text(library: Mapping[str, object]) -> str:
    """A library's kernel and its knobs as the last screen shows them: `torch float32_convert`."""
    knobs: dict[str, object] = json.loads(str(library["config"]))
    named = [value if isinstance(value, str) else f"{name}={value}" for name, value in knobs.items()]
    return " ".join((str(library["kernelName"]), *filter(None, named)))


def _not_compared_lines(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Why rows are not compared with their recorded times, the most frequent reason first."""
    for reason, count in Counter(str(row["reason"]) for row in rows if row["verdict"] == NOT_COMPARED).most_common():
        yield f"verify: {counted(count, 'row')} {reason}"


def _retune_command(stale: Sequence[Mapping[str, object]], context: Context) -> str:
    """The command that tunes stale rows again, into their table if they are from a single one."""
    args = [*context.reproduce_args, "shapes=csv", f"shapes.path={context.run_dir / 'stale.csv'}"]
    args = _with_libraries(args, {str(row["libtype"]) for row in stale}, context)
    if not any(arg.startswith("kernel=") for arg in args):
        args.insert(0, f"kernel={context.family.name}")
    tables = {str(row["place"]).rpartition(":")[0] for row in stale}
    args += [f"output={each}" for each in tables if len(tables) == 1 and each.endswith(".csv")]
    if context.device.kind == "cpu" and not any(arg.startswith("device") for arg in args):
        args.append("device=cpu")
    return shell_join(["gemmpipe", *args, "retune=true"])


def _with_libraries(args: list[str], labels: set[str], context: Context) -> list[str]:
    """The arguments, with the libraries of these rows among the backends if the run had not chosen them."""
    added = [_OPTIONS.get(label, label) for label in context.row_backends if label in labels]
    if not added:
        return args
    typed = next((arg for arg in args if arg.startswith("backend=")), None)
    labelled = [_OPTIONS.get(each.label, each.label) for each in context.implementations]
    chosen = typed.partition("=")[2].strip("[]").split(",") if typed else labelled
    text = f"backend=[{','.join(dict.fromkeys([*filter(None, chosen), *added]))}]"
    return [text if arg == typed else arg for arg in args] if typed else [*args, text]


def _failure(own: Mapping[str, object] | None) -> str:
    return "not run" if own is None else f"{own['status']}: {own['error'] or 'no reason given'}"


def _baseline(
    own: Mapping[str, object], timed: Sequence[Mapping[str, object]], context: Context
) -> Mapping[str, object] | None:
    """The fastest other library path that takes no more weight memory than the winner."""
    others = [
        t
        for t in timed
        if t["libtype"] in context.family.baseline
        and t["candidate"] != own["candidate"]
        and int(str(t["extra_weight_bytes"])) <= int(str(own["extra_weight_bytes"]))
    ]
    # A pruned one has times of early rounds alone: it is the baseline only where all libraries were pruned.
    return min(others, key=lambda t: (t["status"] != str(Status.OK), float(str(t["us"]))), default=None)


def why_not_compared(row: Mapping[str, object], own: Mapping[str, object], own_policy: str, run_device: str) -> str:
    """Why the recorded time of a row and its time of now (`own`) cannot be compared; empty if they can."""
    policy, device = str(row.get("policy") or "unknown"), row.get("device")
    apart = "not compared with the recorded time"
    if shared := {SHARED_CPU, SHARED_GPU}.intersection(policy.split()):
        how = f"while other processes used the device ({', '.join(sorted(shared))})"
        return f"{apart}, taken {how}: retune=true on an idle machine replaces it"
    if own.get("shared") is True:
        return f"{apart}: other processes use the device now; an idle one can be compared"
    if policy != own_policy or is_provisional(policy):
        return f"{apart}: its policy is '{policy}', this run's '{own_policy}'"
    if device not in (None, run_device):
        return f"{apart}: its device is {device}, this one {run_device}"
    return ""


def _summary(rows: Sequence[Mapping[str, object]], max_drift_pct: float) -> str:
    counts = Counter(row["verdict"] for row in rows)
    drifts = [float(str(row["drift"])) for row in rows if row.get("drift") is not None]
    text = (
        f"verify: {counts[HOLDS]:,} of {counted(len(rows), 'row')} {verb(counts[HOLDS] or len(rows), 'holds', 'hold')}"
    )
    if counts[NOT_COMPARED]:
        text += f"; {counts[NOT_COMPARED]:,} correct, but not compared with the recorded time"
    if counts[NOT_RUN]:
        text += f"; {counts[NOT_RUN]:,} cannot run here"
    if drifts:
        mean = math.exp(sum(map(math.log, drifts)) / len(drifts))
        text += f"; time over the recorded one: {mean:.3f} (geometric mean), {min(drifts):.3f} to {max(drifts):.3f}"
        faster = sum(drift < 1 - max_drift_pct / 100 for drift in drifts)
        text += f"; {faster} faster by more than {max_drift_pct:g} %" if faster else ""
    return text
