"""Giving jobs of a stage to the workers: each problem to the one on whose device it is timed."""

from collections.abc import MutableSequence

from gemmpipe.jobs import Job
from gemmpipe.stages import Context

_AHEAD = 2  # jobs a worker has: the one in hand, and the next so that it need not wait


def hand_out(queue: MutableSequence[Job], context: Context) -> None:
    """Give the next jobs to who has these problems, or to whoever has room where nobody does; they leave the queue."""
    for worker in range(len(context.pool.devices)):
        while context.pool.backlog(worker) < _AHEAD:
            job = next((j for j in queue if context.home(j.problem.id) in (worker, None)), None)
            if job is None:
                break
            queue.remove(job)
            if context.home(job.problem.id) is None:
                context.settle(job.problem.id, worker)
            context.journal.launch(job.stage, job.problem.id, list(job.candidates))
            context.pool.submit(job, worker)
