"""Finalists from the trials table, and the policies of their rows."""

from pathlib import Path

import pytest
from stage_contexts import stage_context

from gemmpipe.core.data import FINALS, Candidate, Device, Status, Trial
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.stages.rows import trial_frame
from gemmpipe.stages.selections import finalists_of, policy, policy_of_times
from gemmpipe.tables.merge import BOTH_CLOCKS, CUT_SHORT, DEPENDENT, SHARED_GPU, SUSTAINED

DEFAULTS = KernelDefaults(dtype=None, out_dtype=None, bias=None)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lacks", [False, True])
@pytest.mark.parametrize("cut_short", [False, True])
def test_a_rows_policy_is_that_of_its_trial(
    tmp_path: Path, h200: Device, shared: bool, lacks: bool, cut_short: bool
) -> None:
    family = load_family("a16w16")
    trial = Trial(
        stage=FINALS,
        problem="p",
        candidate=Candidate.of("torch", {}),
        status=Status.OK,
        launches=3,
        samples_us=(1.0, 2.0, 3.0),
        err_ratio=0.0,
        shared=shared,
        no_dependent_launch=lacks,
    )
    [finalist] = finalists_of(trial_frame([trial], {}), FINALS)["p"]
    assert (finalist.shared, finalist.no_dependent_launch) == (shared, lacks)
    context = stage_context(tmp_path, family, DEFAULTS, h200, policy=f"graph {DEPENDENT}")
    problem = make_problem(family, {"M": 1, "N": 16, "K": 16}, DEFAULTS, h200.gfx, "case")
    context.cut_short.update({problem.id} if cut_short else ())
    words = policy([problem], finalist, context).split()
    assert words[0] == "graph"
    assert (DEPENDENT in words) == (not lacks)
    assert (SHARED_GPU in words) == shared
    assert (CUT_SHORT in words) == cut_short


@pytest.mark.parametrize(
    ("ms", "no_dependent", "words"),
    [
        ((4096,), False, "graph both_clocks dependent"),
        ((4096, 4096), True, "graph both_clocks"),
        ((16,), False, "graph dependent"),
        ((16, 16), True, "graph"),
        ((4096, 16), False, "graph both_clocks dependent"),
    ],
)
@pytest.mark.parametrize("clocks", [BOTH_CLOCKS, SUSTAINED])
def test_only_products_at_the_power_limit_are_timed_at_both_clocks(
    h200: Device, ms: tuple[int, ...], no_dependent: bool, words: str, clocks: str
) -> None:
    """The row of a bucket of several Ms has the sum of their times; a reused run may have the former word."""
    family = load_family("a16w16")
    problems = [make_problem(family, {"M": rows, "N": 8192, "K": 8192}, DEFAULTS, h200.gfx, "case") for rows in ms]
    run_policy = f"graph {clocks} {DEPENDENT}"
    expected = words.replace(BOTH_CLOCKS, clocks)
    assert policy_of_times(run_policy, family, problems, no_dependent=no_dependent) == expected
