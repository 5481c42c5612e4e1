"""Rows of the selections table: the chosen candidate, its times, and its comparison with others."""

import json
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Protocol

from gemmpipe.core.data import TIMED, Device, Problem, Status
from gemmpipe.family import Family, GemmSpec
from gemmpipe.family.roofline import reaches_power_limit
from gemmpipe.stages.rows import candidate_of, config_text, quantile
from gemmpipe.stages.selection_rules import Finalist, Selection
from gemmpipe.tables.merge import BOTH_CLOCKS, CUT_SHORT, DEPENDENT, SUSTAINED, shared_policy, without

if TYPE_CHECKING:
    import pandas as pd


def finalists_of(trials: "pd.DataFrame", stage: str) -> dict[str, list[Finalist]]:
    """By problem id: the correct and timed candidates of this stage of a trials table."""
    timed = trials[(trials["stage"] == stage) & trials["status"].isin([*map(str, TIMED)]) & trials["us"].notna()]
    found: dict[str, list[Finalist]] = {}
    columns = ["problem", "libtype", "config", "samples_us", "extra_weight_bytes", "err_ratio", "kernelName"]
    rows = timed[[*columns, "status", "shared", "no_dependent_launch"]].itertuples(index=False)
    for problem, libtype, config, samples, extra, err, name, status, shared, no_dependent in rows:
        finalist = Finalist(
            candidate=candidate_of(libtype, config),
            samples_us=tuple(samples),
            extra_weight_bytes=int(extra),
            err_ratio=float(err),
            kernel_name=name,
            complete=status == Status.OK,
            shared=bool(shared),
            no_dependent_launch=bool(no_dependent),
        )
        found.setdefault(problem, []).append(finalist)
    return found


class RowContext(Protocol):
    """The facts of a run that its rows have: a `Context`, or those of a replay."""

    @property
    def family(self) -> Family: ...
    @property
    def device(self) -> Device: ...
    @property
    def run_id(self) -> str: ...
    @property
    def policy(self) -> str: ...
    @property
    def cut_short(self) -> AbstractSet[str]: ...


def policy_of_times(run_policy: str, family: Family, problems: Iterable[Problem], *, no_dependent: bool) -> str:
    """The run's policy without what times of these problems do not have."""
    if not any(reaches_power_limit(family, family.spec(problem)) for problem in problems):
        run_policy = without(run_policy, BOTH_CLOCKS, SUSTAINED)
    return without(run_policy, DEPENDENT) if no_dependent else run_policy


def policy(problems: Collection[Problem], finalist: Finalist, context: RowContext) -> str:
    """The row's policy; a shared device or a search cut short make it provisional: it only fills a gap."""
    parts = [policy_of_times(context.policy, context.family, problems, no_dependent=finalist.no_dependent_launch)]
    if finalist.shared and shared_policy(context.device.kind) not in context.policy:
        parts.append(shared_policy(context.device.kind))
    if any(p.id in context.cut_short for p in problems):
        parts.append(CUT_SHORT)
    return " ".join(parts)


def base_row(problem: Problem, spec: GemmSpec, finalist: Finalist, context: RowContext) -> dict[str, object]:
    """The cells of a problem, its chosen finalist, and its times."""
    ordered = sorted(finalist.samples_us)
    time_us = finalist.time_us
    return {
        **dict(problem.key),
        "problem": problem.id,
        "format": "",
        "bucket": "",
        "gfx": context.device.gfx,
        "cu_num": context.device.cu_num,
        "libtype": finalist.candidate.backend,
        "solidx": finalist.candidate.knobs.get("solidx", 0),  # where a library numbers its kernels
        "splitK": finalist.candidate.knobs.get("NUM_KSPLIT", 1),
        "us": round(time_us, 4),
        "kernelName": finalist.kernel_name,
        "err_ratio": round(finalist.err_ratio, 4),
        "tflops": round(context.family.flops(spec) / time_us / 1e6, 2),
        "bw": round(context.family.bytes_moved(spec) / time_us / 1e3, 2),
        "config": config_text(finalist.candidate),
        "p20_us": _rounded(quantile(ordered, 0.2)),
        "p80_us": _rounded(quantile(ordered, 0.8)),
        "policy": policy([problem], finalist, context),
        "run_id": context.run_id,
        "device": context.device.name,
        "candidate": finalist.candidate.id,
        "extra_weight_bytes": finalist.extra_weight_bytes,
        "weight": problem.weight,
        "layer": problem.layer,
    }


def comparison(selection: Selection) -> dict[str, object]:
    """The cells that compare a selection with the baseline, the incumbent and the runner-up."""
    baseline, ratio = selection.baseline, selection.ratio
    return {
        "baseline": baseline.kernel_name if baseline else None,
        "baseline_config": config_text(baseline.candidate) if baseline else None,
        "baseline_us": _rounded(baseline.time_us) if baseline else None,
        "ratio": _significant(ratio.median) if ratio else None,
        "ratio_low": _significant(ratio.low) if ratio else None,
        "ratio_high": _significant(ratio.high) if ratio else None,
        "near_ties": selection.near_ties,
        "backend_ratios": _ratios_text(selection.backend_ratios),
        "incumbent_us": _rounded(selection.incumbent.time_us) if selection.incumbent else None,
        "runner_up": selection.runner_up.kernel_name if selection.runner_up else None,
        "noise_pct": _rounded(selection.noise_pct),
        "runner_up_us": _rounded(selection.runner_up.time_us) if selection.runner_up else None,
        "reason": selection.reason,
    }


def _ratios_text(ratios: Mapping[str, float]) -> str | None:
    rounded = {name: _significant(ratio) for name, ratio in sorted(ratios.items())}
    return json.dumps(rounded, separators=(",", ":")) if rounded else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _significant(ratio: float) -> float:
    """A ratio with six digits: a speed-up of 500 is 0.002, of which four decimals would leave one digit."""
    return float(f"{ratio:.6g}")
