"""Having `triton.autotune` choose for many problems, on the workers, one problem after the other."""

from collections.abc import Sequence

from gemmpipe.data import Trial
from gemmpipe.executors import Built, Finished, finishing
from gemmpipe.jobs import Job
from gemmpipe.jobs.autotuning import AutotuneJob
from gemmpipe.stages import Context
from gemmpipe.stages.dealing import hand_out

STAGE = "autotune"
_WAIT_S = 0.5


def autotuned(jobs: Sequence[AutotuneJob], context: Context) -> dict[str, Trial]:
    """By problem id: what it chose, or how it failed. What an earlier session of the run has is not tuned again."""
    found = {job.problem.id: t for job in jobs for t in context.record.of(STAGE, job.problem.id)}
    queue: list[Job] = [job for job in jobs if job.problem.id not in found]
    open_ = {job.problem.id for job in queue}

    def hear(message: Built | Finished) -> None:
        if isinstance(message, Built) or message.job.stage != STAGE:
            return
        for trial in message.trials:
            context.journal.trial(trial)
            found[trial.problem] = trial
        if message.complete:
            open_.discard(message.job.problem.id)

    context.events.emit("stage", STAGE, total=len(open_))
    total = len(open_)
    with finishing(context.pool, hear):
        while open_:
            hand_out(queue, context)
            for message in context.pool.poll(_WAIT_S):
                hear(message)
            context.check()
            context.events.emit("progress", done=total - len(open_))
    return found
