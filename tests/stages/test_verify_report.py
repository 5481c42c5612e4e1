"""Which recorded times verify compares with those of now."""

from pathlib import Path

import pandas as pd
import pytest
from stage_contexts import stage_context

from gemmpipe.bench.timer import PairedRatio
from gemmpipe.core.data import FINALS, Candidate, Device, Status, Trial
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.stages.rows import trial_frame
from gemmpipe.stages.verify_report import HOLDS, NOT_COMPARED, VerifyReport, why_not_compared

DEFAULTS = KernelDefaults(dtype=None, out_dtype=None, bias=None)

ALONE = "host interleaved"


@pytest.mark.parametrize(
    ("row", "own", "printed"),
    [
        ({"policy": ALONE, "device": "cpu"}, {"shared": False}, ""),
        ({"policy": ALONE, "device": None}, {"shared": float("nan")}, ""),
        ({"policy": f"{ALONE} shared_cpu", "device": "cpu"}, {"shared": False}, "(shared_cpu): retune=true on an idle"),
        ({"policy": f"{ALONE} shared_cpu", "device": "cpu"}, {"shared": True}, "(shared_cpu): retune=true on an idle"),
        ({"policy": ALONE, "device": "cpu"}, {"shared": True}, "other processes use the device now"),
        ({"policy": f"{ALONE} cut_short", "device": "cpu"}, {}, "its policy is 'host interleaved cut_short'"),
        ({"policy": "", "device": "cpu"}, {}, "its policy is 'unknown', this run's 'host interleaved'"),
        ({"policy": ALONE, "device": "other"}, {}, "its device is other, this one cpu"),
    ],
)
def test_times_are_compared_only_if_both_were_taken_alike(
    row: dict[str, object], own: dict[str, object], printed: str
) -> None:
    reason = why_not_compared(row, own, ALONE, "cpu")
    assert bool(reason) == bool(printed)
    assert printed in reason


@pytest.mark.parametrize(
    ("low", "median", "shared", "rounds", "is_behind"),
    [
        (1.2, 1.3, False, 1, True),
        (1.2, 1.3, True, 3, False),
        (1.6, 1.7, True, 3, True),
        (1.6, 1.7, True, 2, False),
        (0.9, 1.3, False, 3, False),
    ],
)
def test_a_library_is_ahead_on_a_shared_device_only_by_far_and_in_several_rounds(
    low: float, median: float, shared: bool, rounds: int, is_behind: bool
) -> None:
    report = VerifyReport(max_drift_pct=10, max_behind_pct=1, max_call_overhead_pct=None)
    ratio = PairedRatio(median=median, low=low, high=2.0)
    library = {"kernelName": "torch", "config": '{"method":"float32_convert","split":2}', "us": 23734.59}
    own = {"shared": shared, "samples_us": [40_000.0] * rounds, "us": 40_000.0}
    reason = report._behind(own, ratio, library)
    assert bool(reason) == is_behind
    if is_behind:
        assert reason.startswith("behind: torch float32_convert split=2 takes 23.7 ms, ")
        assert reason.endswith(" % less than the row's 40.0 ms")


@pytest.mark.parametrize("m", [16, 4096])
@pytest.mark.parametrize("no_dependent", [False, True])
@pytest.mark.parametrize("word", ["both_clocks", "sustained", ""])
@pytest.mark.parametrize("last", ["dependent", ""])
def test_a_recorded_time_is_compared_with_one_taken_alike(
    tmp_path: Path, h200: Device, m: int, no_dependent: bool, word: str, last: str
) -> None:
    """Only a product at the power limit has `both_clocks`, and `dependent` only times after such a launch."""
    family = load_family("a16w16")
    problem = make_problem(family, {"M": m, "N": 8192, "K": 8192}, DEFAULTS, h200.gfx, "case")
    trial = Trial(
        stage=FINALS,
        problem=problem.id,
        candidate=Candidate.of("triton", {"n": 1}),
        status=Status.OK,
        samples_us=(10.0, 10.0, 10.0),
        err_ratio=0.0,
        no_dependent_launch=no_dependent,
    )
    recorded = {
        **dict(problem.key),
        "problem": problem.id,
        "candidate": trial.candidate.id,
        "place": "table.csv:2",
        "libtype": "triton",
        "config": "{}",
        "kernelName": "k",
        "us": 10.0,
        "reason": "",
        "policy": " ".join(filter(None, ("graph", word, last))),
        "device": h200.name,
    }
    context = stage_context(tmp_path, family, DEFAULTS, h200, policy="graph both_clocks dependent", problems=[problem])
    report = VerifyReport(max_drift_pct=5, max_behind_pct=1, max_call_overhead_pct=None)
    tables = {"selections": pd.DataFrame([recorded]), "trials": trial_frame([trial], {})}
    [verdict] = report.run(tables, context)["verified"]["verdict"]
    alike = word == ("both_clocks" if m == 4096 else "") and (last == "dependent") != no_dependent
    assert verdict == (HOLDS if alike else NOT_COMPARED)
