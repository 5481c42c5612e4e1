"""The expected time of later stages is asked for before the workers start, on devices of every kind."""

from pathlib import Path

import pytest
from stage_contexts import stage_context

from gemmpipe.cli.main import main
from gemmpipe.core.data import Device
from gemmpipe.core.events import Event, Events
from gemmpipe.pipeline.plan import Plan
from gemmpipe.pipeline.steps import emit_step

ITEMS = ("kernel=a8w8_blockscale", "shapes=list", "shapes.items=[{M: [1, 64], N: 1280, K: 8192}]")
COMMANDS = {
    "tune": ("tune", *ITEMS),
    "engine": ("tune", *ITEMS, "format=[csv,vllm]"),
    "quick": ("quick", *ITEMS),
    "compare": ("compare", *ITEMS),
    "verify": ("verify", "kernel=a8w8_blockscale", "table=rows.csv"),
    "prebuild": ("prebuild", "kernel=a8w8_blockscale", "table=rows.csv"),
}
TIMING = {"tune", "engine", "quick", "compare", "verify"}


@pytest.mark.parametrize("command", COMMANDS)
def test_stages_before_the_workers_state_the_time_of_those_after_them(
    command: str, plans: list[Plan], h200: Device, folder: Path
) -> None:
    (folder / "rows.csv").write_text("gfx,cu_num,M,N,K,libtype,us\nsm_90,132,1,1280,8192,torch,9.0\n")
    assert main([*COMMANDS["tune"]]) == 0
    problems = plans[-1].source.problems(plans[-1].family, plans[-1].defaults, h200.gfx)
    assert main([*COMMANDS[command]]) == 0
    plan, said = plans[-1], list[Event]()
    context = stage_context(
        folder, plan.family, plan.defaults, h200, problems=problems, events=Events(listeners=[said.append])
    )
    assert context.pool_or_none is None
    emit_step(plan, plan.chain[0], context)
    (step,) = said
    assert (step.rest_s or 0) >= 0
    assert (command in TIMING) == bool(step.rest_s), "the stages that time take time"
