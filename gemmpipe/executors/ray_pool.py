"""The driver's side of a Ray cluster: who has which job in hand, and what is done again when a node is lost."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from gemmpipe.data import Build
from gemmpipe.errors import EnvironmentProblem
from gemmpipe.events import Events
from gemmpipe.executors import Built, Finished, Pool, Usage
from gemmpipe.executors.build_tasks import BuildTasks
from gemmpipe.executors.place import Place
from gemmpipe.executors.seat import Heard, Lease, Seat
from gemmpipe.executors.whereabouts import Whereabouts, code_of, trouble
from gemmpipe.jobs import Job

if TYPE_CHECKING:
    from gemmpipe.executors.ray import Ray

_EXCHANGE_S = 2.0
_LOOK_S = 0.5
_LISTEN_S = 0.02
_LOSSES = 5  # so many in a row without a result: the cluster cannot run this


class RayPool(Pool):
    """Seats on a cluster. A lost seat's unfinished work is done again on a new one, or by another place."""

    def __init__(self, executor: "Ray", lease: Lease, workers: int, events: Events, check: Callable[[], None]) -> None:
        import ray

        self._ray: Any = ray
        self._executor = executor
        self._lease = lease
        self._events = events
        # There before anything is unpickled: jobs and backends may name classes of the user's own.
        folders = [*lease.python_path, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(folders)}}
        self._inbox: list[Built | Finished] = []
        self.builds_done = []
        self._began = time.monotonic()
        self._places = [Place(name=f"place-{number}") for number in range(workers)]
        for place in self._places:
            self._seat(place)
        seen = self._whereabouts(check)
        self.devices = tuple(each.device for each in seen)
        self._first, self._code = seen[0], code_of(lease.python_path)
        for place, each in zip(self._places, seen, strict=True):
            if why := trouble(each, self._first, self._code):
                raise EnvironmentProblem(why)
            place.address = each.address
        nodes = [""] if executor.shared_cache else sorted({each.node for each in seen})
        self._tasks = BuildTasks(
            executor=executor,
            device=self.devices[0],
            nodes=nodes,
            environment=self._environment,
            python_path=lease.python_path,
            began=self._began,
        )

    # Seats

    def _seat(self, place: Place) -> None:
        """Ask the cluster for a device."""
        place.address = ""
        wanted = {"num_gpus": 1, "num_cpus": 0} if self._lease.gpu else {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        actor = self._ray.remote(Seat).options(max_restarts=0, runtime_env=self._environment, **wanted)
        place.seat = actor.remote(self._lease, place.name)

    def _whereabouts(self, check: Callable[[], None]) -> Sequence[Whereabouts]:
        """Where each seat is, as soon as all have a device. Raises what `check` does."""
        found = [place.seat.whereabouts.remote() for place in self._places]
        told = False
        while True:
            _, waiting = self._ray.wait(found, num_returns=len(found), timeout=_LOOK_S)
            if not waiting:
                break
            if not told and time.monotonic() - self._began > 20:
                told = True
                self._events.emit("line", f"waiting for {len(waiting)} of {len(found)} workers of the Ray cluster")
            check()
        try:
            seen: Sequence[Whereabouts] = self._ray.get(found)
        except self._ray.exceptions.RayError as error:
            raise EnvironmentProblem(
                f"a worker cannot start on the Ray cluster: {_reason(error)}; gemmpipe ships no code: every node needs "
                "what is here"
            ) from None
        return seen

    # Jobs

    def submit(self, job: Job, worker: int) -> None:
        if job.candidates:
            self._place(worker).outbox.append(job)
        else:
            self._inbox.append(Finished(job=job, trials=()))

    def _place(self, worker: int) -> Place:
        place = self._places[worker]
        while place.stand_in is not None:
            place = place.stand_in
        return place

    def backlog(self, worker: int) -> int:
        place = self._place(worker)
        return len(place.outbox) + place.backlog

    def forget_queued(self, worker: int) -> None:
        place = self._place(worker)
        place.outbox.clear()
        place.forget = True

    def poll(self, timeout_s: float, ears: Sequence[Connection | int] = ()) -> Sequence[Built | Finished]:
        deadline = time.monotonic() + timeout_s
        while True:
            self._ask()
            self._tasks.start_more()
            messages, self._inbox = self._inbox, []
            left = deadline - time.monotonic()
            if messages or left <= 0 or wait(ears, timeout=0):
                return messages
            asked = {place.asked: place for place in self._places if place.asked is not None}
            references = [*asked, *self._tasks.running]
            if not references:
                time.sleep(min(left, 0.05))
                continue
            look_s = _LISTEN_S if ears else _LOOK_S  # Ray waits for its own alone
            ready, _ = self._ray.wait(references, num_returns=1, timeout=min(left, look_s))
            for reference in ready:
                if reference in asked:
                    self._hear(asked[reference])
                elif (built := self._tasks.take(reference)) is not None:
                    self.builds_done.append(time.monotonic())
                    self._inbox.append(built)

    def _ask(self) -> None:
        """Send jobs to seats that are free to listen; give up waiting for seats that nobody gives."""
        for place in self._places:
            if place.stand_in is not None:
                continue
            if place.asked is None and place.outbox and not place.address:
                place.asked = place.seat.whereabouts.remote()
            elif place.asked is None and (place.outbox or place.backlog or place.forget):
                jobs = list(place.outbox)
                place.outbox.clear()
                place.in_hand += [(job, set(job.candidates)) for job in jobs]
                place.backlog += len(jobs)
                place.asked = place.seat.exchange.remote(jobs, place.forget, _EXCHANGE_S)
                place.forget = False
            if place.lost_at is not None and time.monotonic() - place.lost_at > self._executor.join_s:
                self._hand_over(place, "no node within executor.join_s")

    def _hear(self, place: Place) -> None:
        reference, place.asked = place.asked, None
        try:
            heard: Heard | Whereabouts = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # not Ray's fault: the desk itself gave up
            raise EnvironmentProblem(f"{place.name}: {error.cause}") from None
        except self._ray.exceptions.RayError as error:
            self._lost(place, _reason(error))
            return
        if isinstance(heard, Whereabouts):
            self._arrived(place, heard)
            return
        place.losses, place.lost_at = 0, None
        place.backlog, place.usage = heard.backlog, replace(heard.usage, name=f"{place.name} {heard.usage.name}")
        for event in heard.events:
            self._events.emit(event.kind, event.text)
        for message in heard.messages:
            place.cross_out(message)
        self._inbox += heard.messages
        if not heard.backlog:
            place.in_hand.clear()

    def _lost(self, place: Place, why: str) -> None:
        """The node, or the seat on it, is gone: nobody is blamed, what is open is done again on a new one."""
        place.losses += 1
        place.lost_at = place.lost_at or time.monotonic()
        if place.losses >= _LOSSES:
            self._give_up(place, f"lost {place.losses} times in a row on the Ray cluster: {why}")
            return
        seat = f"{place.name} on {place.address}" if place.address else place.name
        self._events.emit("warning", f"{seat} lost its node or its Ray worker; its work is done again: {why}")
        place.outbox.extendleft(reversed(place.unfinished()))
        self._ray.kill(place.seat)  # may be out of reach only, and would keep its device
        self._seat(place)

    def _arrived(self, place: Place, where: Whereabouts) -> None:
        """A new seat said where it is: on another kind of device, or with other code, it gets no work."""
        why = trouble(where, self._first, self._code)
        if why is None:
            place.address = where.address
            return
        place.lost_at = place.lost_at or time.monotonic()
        self._give_up(place, why)

    def _give_up(self, place: Place, why: str) -> None:
        """Another place takes the work at once. Raises EnvironmentProblem where there is none."""
        self._hand_over(place, why)
        if place.stand_in is None:
            raise EnvironmentProblem(f"{place.name}: {why}")

    def _hand_over(self, place: Place, why: str) -> None:
        """Another place takes the work, if there is one that has a node."""
        others = [p for p in self._places if p is not place and p.stand_in is None and p.lost_at is None]
        if not others:
            place.lost_at = time.monotonic()
            return
        place.stand_in = min(others, key=lambda p: len(p.outbox) + p.backlog)
        self._events.emit("warning", f"{place.name}: {why}; {place.stand_in.name} takes over")
        place.stand_in.outbox.extend([*place.unfinished(), *place.outbox])
        place.outbox.clear()
        place.asked = None
        self._ray.kill(place.seat)

    # Builds

    def compile(self, build: Build) -> None:
        self._tasks.submit(build)

    def forget_builds(self) -> None:
        self._tasks.forget_queued()

    # The end

    def usage(self) -> list[Usage]:
        return [self._tasks.usage, *(place.usage for place in self._places)]

    def close(self, *, kill: bool = False) -> None:
        for place in self._places:
            if place.seat is not None:
                self._ray.kill(place.seat)  # its worker process ends with it
                place.seat = None
        self._ray.shutdown()


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]
