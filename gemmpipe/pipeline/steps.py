"""The expected time of the stages that follow, so that a listener can estimate when the run ends."""

from collections.abc import Callable, Mapping

from gemmpipe.pipeline.plan import Plan
from gemmpipe.stages import Context
from gemmpipe.stages.bench import Bench


def emit_step(plan: Plan, stage: str, context: Context, finished: int = 0, later: int = 0) -> None:
    """Notify the listeners that a stage begins, with the expected time of the next stages of its problems.

    `finished` and `later` are the numbers of problems in earlier and later batches. A stage takes as long per problem
    as it did in this run; in the first batch, as long as it expects.
    """
    problems = len(context.problems)
    position = plan.chain.index(stage)
    timed = plan.stages[stage].uses_device
    rest_s = 0.0
    for name in plan.chain[position + 1 :]:
        spent_s = context.stage_seconds.get(f"{name}_s", 0.0)
        rest_s += problems * spent_s / finished if finished else _expected_s(plan, name, context)
    context.events.emit(
        "step",
        stage,
        done=position + 1,
        total=len(plan.chain),
        rest_s=rest_s,
        later=later / problems if problems else 0.0,
        number=max(1, context.cpu_budget.passes) if context.cpu_budget is not None and timed else 1,
    )


def finals_after(plan: Plan, stage: str, context: Context) -> Callable[[Mapping[str, float], int], float] | None:
    """`Context.finals_s` of a stage in the first batch: the finals after it; None where there are none, or on a CPU."""
    position = plan.chain.index(stage)
    benches = [name for name in plan.chain[position + 1 :] if isinstance(plan.stages[name], Bench)]
    if not benches or context.device.kind == "cpu" or not context.per_problem:
        return None
    bench = plan.stages[benches[0]]
    assert isinstance(bench, Bench)
    counted_s, finals_s = bench.expected_s(context), bench.finals_s(context, compared=plan.stages[stage].is_comparison)
    return lambda fastest_us, finalists: finals_s(fastest_us, finalists) - counted_s


def _expected_s(plan: Plan, name: str, context: Context) -> float:
    stage = plan.stages[name]
    return 0.0 if stage.per_problem and not context.per_problem else stage.expected_s(context)
