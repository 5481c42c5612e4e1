"""Screen's scheduler: builds, then what is ready, then the devices; problems interleaved so that none waits."""

import time
from collections.abc import Iterable, Sequence

from gemmpipe.data import Candidate, Trial
from gemmpipe.executors import Built, Finished
from gemmpipe.family import GemmSpec
from gemmpipe.jobs.screening import ScreenJob
from gemmpipe.search import Request
from gemmpipe.stages import Context
from gemmpipe.stages.bounds import Bounds
from gemmpipe.stages.course import Course
from gemmpipe.stages.hunting import Hunts
from gemmpipe.timer import Timer

_BATCH = 64  # requests a job: long enough to hide the exchange with the worker, short enough to lose little
_AT_ONCE = 4  # problems of a worker
_AHEAD = 3  # jobs a worker has in hand and next, so that it never waits for the driver


class Scheduler:
    """Runs courses to their end on a pool."""

    def __init__(
        self, context: Context, hunts: Hunts, timer: Timer, bounds: Bounds, deadline: float | None = None
    ) -> None:
        """`deadline` on the monotonic clock: searches end there, with what they know by then."""
        self._context = context
        self._hunts = hunts
        self._pool = context.pool
        self._watch = context.watch
        self._journal = context.journal
        self._timer = timer
        self._bounds = bounds
        self._courses: dict[str, Course] = {}
        """By problem id."""
        self._going: dict[str, Course] = {}
        """Those that are not over."""
        self._stirred: dict[str, Course] = {}
        """Those whose search may have something new to ask."""
        self._built: dict[str, str] = {}
        self._waiting: dict[str, dict[str, Course]] = {}
        """By build, who waits for it."""
        self._deadline = deadline
        self.trials = 0

    def add(self, course: Course) -> None:
        """Take in a course and queue the builds that it asks for: they compile while the next one is listed."""
        self._courses[course.problem.id] = course
        course.worker = self._context.home(course.problem.id)
        if course.worker is None and len(self._pool.devices) == 1:
            course.worker = 0
            self._context.settle(course.problem.id, 0)
        for trial in self._context.record.of("screen", course.problem.id):
            self._bounds.learn(course.problem, trial)
        self._advance(course)

    def also(self, course: Course, requests: Sequence[Request]) -> None:
        """Time these candidates of a course beside what its search asked for."""
        failures = course.further(requests, self._built)
        self._go_on(course, failures)

    def _advance(self, course: Course) -> None:
        with self._watch.spending("search"):
            failures = course.pump(self._built)
        self._go_on(course, failures)

    def _go_on(self, course: Course, failures: Sequence[Trial]) -> None:
        """Introduce and compile what it asked for, and remember whether anything is left."""
        for candidate in course.asked:
            self._journal.kernel_names[candidate.id] = course.kernel_names[candidate.id]
            builds = tuple(build.id for build in course.builds[candidate.id])
            self._journal.builds[course.problem.id, candidate.id] = builds
        course.asked.clear()
        self._note(course, failures)
        for build in course.wanted:
            waiting = self._waiting.get(build.id)
            if waiting is None:
                waiting = self._waiting[build.id] = {}
                self._pool.compile(build)
            waiting[course.problem.id] = course
        course.wanted.clear()
        if course.over:
            self._going.pop(course.problem.id, None)
        else:
            self._going[course.problem.id] = course

    @property
    def over(self) -> int:
        """How many courses are over."""
        return len(self._courses) - len(self._going)

    @property
    def late(self) -> bool:
        """Whether the time for searches is over."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def step(self, timeout_s: float, *, more: bool = False) -> bool:
        """Hand out what is ready, hear what is new; False when every course is over and no `more` will be added."""
        if self.late:
            for course in self._going.values():
                course.end()
            self._stirred |= self._going
        while self._stirred:
            self._advance(self._stirred.pop(next(iter(self._stirred))))
        self._dispatch()
        if not self._going and not more:
            return False
        for message in self._pool.poll(timeout_s, self._hunts.ears()):
            self.hear(message)
        with self._watch.spending("search"):
            names = self._hunts.hear()
        self._stirred |= {name: self._courses[name] for name in names if name in self._courses}
        return True

    def hear(self, message: Built | Finished) -> None:
        """Take one message of the pool."""
        if isinstance(message, Built):
            self._take_build(message)
        elif message.job.problem.id in self._courses:
            self._take_trials(message)

    def _take_build(self, message: Built) -> None:
        facts = message.facts
        self._built[message.build.id] = facts.error
        self._hunts.know(message.build.id, facts)
        self._journal.build(message.build.id, facts)
        # None of this batch: one before it was late, and left builds in the pool that nobody waits for.
        for course in self._waiting.get(message.build.id, {}).values():
            self._stir(course, course.built(message.build.id, facts.error))

    def _take_trials(self, message: Finished) -> None:
        course = self._courses[message.job.problem.id]
        trials = list(message.trials)
        if message.complete:
            told = {t.candidate for t in trials}
            trials += course.unanswered([c for c in message.job.candidates if c not in told])
        with self._watch.spending("search"):
            taken = course.tell(trials)
        self._stir(course, taken)

    def _stir(self, course: Course, trials: Sequence[Trial]) -> None:
        """Its search was told these."""
        if trials:
            self._stirred[course.problem.id] = course
            self._note(course, trials)

    def _note(self, course: Course, trials: Iterable[Trial]) -> None:
        with self._watch.spending("journal"):
            for trial in trials:
                self.trials += 1
                self._bounds.learn(course.problem, trial)
                self._hunts.learn(trial)
                self._journal.trial(trial)

    def _dispatch(self) -> None:
        """Keep every worker busy; claims go around, who has the fewest problems first."""
        own: list[list[Course]] = [[] for _ in self._pool.devices]
        for course in self._going.values():
            if course.worker is not None:
                own[course.worker].append(course)
        hungry = sorted(range(len(own)), key=lambda worker: len(own[worker]))
        while hungry:
            for worker in hungry:
                self._feed(worker, own[worker])
            hungry = [worker for worker in hungry if self._claim(worker, own[worker])]

    def _feed(self, worker: int, own: list[Course]) -> None:
        """Give a worker what is ready of its own problems."""
        mine = [c for c in own if c.ready] if self._pool.backlog(worker) < _AHEAD else []
        while mine and self._pool.backlog(worker) < _AHEAD:
            # While builds arrive, the fullest; afterwards in order, so that small M comes before large.
            waiting = len(self._built) < len(self._waiting)
            course = max(mine, key=lambda c: len(c.ready)) if waiting else mine[0]
            if not self._hand_out(course, worker) or not course.ready:
                mine.remove(course)

    def _claim(self, worker: int, own: list[Course]) -> bool:
        """Who runs out of work takes the most expensive problem that nobody has: so all end together.

        But only who would be idle takes more at a time than hide how long searches think.
        """
        backlog = self._pool.backlog(worker)
        if backlog >= _AHEAD or (backlog and len(own) >= _AT_ONCE):
            return False
        free = [c for c in self._going.values() if c.worker is None and c.ready]
        if not free:
            return False
        course = max(free, key=lambda c: len(c.outline.ids) * work(c.outline.spec))
        course.worker = worker
        own.append(course)
        self._context.settle(course.problem.id, worker)
        return True

    def _hand_out(self, course: Course, worker: int) -> bool:
        """Submit a job of the course's ready requests; False when they must wait for a first result."""
        requests = self._next_requests(course)
        if not requests:
            return False
        self._journal.launch("screen", course.problem.id, [r.candidate for r in requests])
        job = ScreenJob(
            stage="screen",
            problem=course.problem,
            requests=tuple(requests),
            timer=self._timer,
            library=frozenset(self._context.family.baseline),
        )
        self._pool.submit(job, worker)
        return True

    def _next_requests(self, course: Course) -> list[Request]:
        """A batch of short ones; a long one goes alone, the most promising first, and only while it can win."""
        short = [r for r in course.ready if not self._bounds.is_long(course.problem, r.candidate)]
        if short:
            chosen = short[:_BATCH]
            for request in chosen:
                course.ready.remove(request)
            return chosen
        if not course.results and course.open > len(course.ready):
            return []  # the first result is on its way, and may settle the rest
        return self._next_long(course)

    def _next_long(self, course: Course) -> list[Request]:
        problem = course.problem
        ranked = sorted(course.ready, key=lambda r: (self._bounds.bound_us(problem, r.candidate), r.candidate.id))
        spared: Candidate | None = self._bounds.spared(problem, course.outline.given)
        for request in ranked:
            course.ready.remove(request)
            dropped = self._bounds.hopeless(problem, request.candidate, course.results.values())
            if dropped is None or request.candidate == spared:
                return [request]
            self._stir(course, course.tell([dropped]))
        return []


def work(spec: GemmSpec) -> float:
    """Relative time of trying one candidate: a first launch, and its launches (an H200, 2026-11: 0.3 ms and 4e13/s)."""
    return 1.0 + spec.m * spec.weight_elements / 4e10
