"""Finalists from the trials table, and the policies of their rows."""

from pathlib import Path

import pytest
from stage_contexts import stage_context

from gemmpipe.core.data import FINALS, Candidate, Device, Status, Trial
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.stages.rows import trial_frame
from gemmpipe.stages.selections import finalists_of, policy
from gemmpipe.tables.merge import CUT_SHORT, DEPENDENT, SHARED_GPU

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
    problem = family.problem((("M", 1), ("N", 16), ("K", 16)))
    context.cut_short.update({problem.id} if cut_short else ())
    words = policy([problem], finalist, context).split()
    assert words[0] == "graph"
    assert (DEPENDENT in words) == (not lacks)
    assert (SHARED_GPU in words) == shared
    assert (CUT_SHORT in words) == cut_short
