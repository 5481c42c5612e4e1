"""The expected time of the stages that follow, so that a listener can estimate when the run ends."""

from gemmpipe.pipeline.plan import Plan
from gemmpipe.stages import Context


def emit_step(plan: Plan, stage: str, context: Context, finished: int = 0, later: int = 0) -> None:
    """Notify the listeners that a stage begins, with the expected time of the next stages of its problems.

    `finished` and `later` are the numbers of problems in earlier and later batches. A stage takes as long per problem
    as it did in this run; in the first batch, as long as it usually does.
    """
    problems, devices = len(context.problems), 1
    if context.pool_or_none is not None:
        devices = len(context.pool.devices)
    position = plan.chain.index(stage)
    timed = plan.stages[stage].uses_device
    rest_s = 0.0
    for name in plan.chain[position + 1 :]:
        spent_s = context.stage_seconds.get(f"{name}_s", 0.0)
        rest_s += problems * (spent_s / finished if finished else plan.stages[name].usual_s(context.device) / devices)
    context.events.emit(
        "step",
        stage,
        done=position + 1,
        total=len(plan.chain),
        rest_s=rest_s,
        later=later / problems if problems else 0.0,
        number=max(1, context.cpu_budget.passes) if context.cpu_budget is not None and timed else 1,
    )
