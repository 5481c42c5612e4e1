"""The screen stage: lists candidates, compiles, races them with few launches and keeps the best for bench."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.data import Bucket, Candidate, Problem, Trial
from gemmpipe.errors import at_least
from gemmpipe.events import counted
from gemmpipe.executors import finishing
from gemmpipe.search import Request
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.bounds import Bounds
from gemmpipe.stages.course import Course
from gemmpipe.stages.earlier import Recall
from gemmpipe.stages.exchange import of_neighbours, siblings, tell_of
from gemmpipe.stages.hunting import Begun, Hunts, Quarry
from gemmpipe.stages.hunting.here import Here
from gemmpipe.stages.listing import SpaceReport
from gemmpipe.stages.rows import config_text, passed_over_frame, problems_of, trial_frame
from gemmpipe.stages.scheduler import Scheduler, work
from gemmpipe.stages.shortlist import Keep, bucket_leaders, bucket_shortlists, shortlist
from gemmpipe.timer import Timer

if TYPE_CHECKING:
    import pandas as pd

_WAIT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Screen(Stage):
    """Races candidates; keeps the fastest `keep`, the best of each backend, incumbents and each bucket's leaders."""

    keep: int
    margin_pct: float
    bucket_keep: int
    timer: Timer

    needs: ClassVar[tuple[str, ...]] = ("problems",)
    gives: ClassVar[tuple[str, ...]] = ("shortlist", "trials")
    uses_device: ClassVar[bool] = True
    races: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least(1, keep=self.keep)
        at_least(0, margin_pct=self.margin_pct, bucket_keep=self.bucket_keep)

    def check(self, context: Context) -> None:
        """Raises UserError for an axis or a value of the space that the family's kernels cannot have."""
        for implementation in context.implementations:
            implementation.check(context.space)

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Shortlist and trials of the problems."""
        problems = problems_of(context.family, tables["problems"])
        hunts = context.hunts or Here(context.ground, context.lore)
        bounds = Bounds(context.family.baseline, _own(context))
        scheduler = Scheduler(context, hunts, self.timer, bounds, _deadline(context))
        context.events.emit("stage", "screen", total=len(problems))
        begun = time.monotonic()
        with finishing(context.pool, scheduler.hear):
            courses = self._begun(problems, hunts, scheduler, context)
            self._to_the_end(scheduler, context)
            if not scheduler.late:
                for course, requests in list(of_neighbours(courses, context)):
                    scheduler.also(course, requests)
            self._to_the_end(scheduler, context)
            for course, requests in self._for_buckets(courses, context):
                scheduler.also(course, requests)
            self._to_the_end(scheduler, context)
        context.pool.forget_builds()  # of searches that a budget ended: nobody waits for them any more
        context.events.emit("progress", done=len(courses))
        _mark(courses, context)
        _account_idle(context, begun)
        return self._tables(courses, context)

    def _to_the_end(self, scheduler: Scheduler, context: Context) -> None:
        while scheduler.step(_WAIT_S):
            _look_around(scheduler, context)

    def _begun(self, problems: list[Problem], hunts: Hunts, scheduler: Scheduler, context: Context) -> list[Course]:
        """The problems' courses, in the scheduler's hands as soon as they are listed."""
        report = SpaceReport()
        courses: list[Course] = []
        hunts.begin(
            [Quarry(problem=p, launches=self.timer.iters, keep=self.keep) for p in _in_order(problems, context)]
        )
        while len(courses) < len(problems):
            for begun in hunts.begun():
                report.add(begun.outline.report)
                courses.append(_course(begun, context))
                scheduler.add(courses[-1])
            # On a CPU, listing would take cores from what is timed.
            if context.device.kind != "cpu":
                scheduler.step(_WAIT_S, more=len(courses) < len(problems))
            _look_around(scheduler, context)
        for line in report.lines():
            context.events.emit("line", line)
        for warning in report.warnings():
            context.events.emit("warning", warning)
        return courses

    def _for_buckets(self, courses: list[Course], context: Context) -> list[tuple[Course, list[Request]]]:
        """A bucket's candidate must be timed at each of its Ms: who leads at one of them is timed at the others."""
        asked: list[tuple[Course, list[Request]]] = []
        for group in siblings(courses):
            for bucket in all_buckets([c.problem for c in group], context):
                inside = [c for c in group if bucket.holds(c.problem.rows)]
                leaders = bucket_leaders(bucket, [c.results for c in inside], self.bucket_keep)
                for course in inside:
                    missing = [c for c in leaders if c.id in course.outline.ids and c not in course.results]
                    for candidate in missing:
                        tell_of(course, candidate, context)
                    glances = [Request(candidate=c, launches=self.timer.iters, glance=True) for c in missing]
                    asked.append((course, glances))
        return asked

    def _tables(self, courses: list[Course], context: Context) -> "dict[str, pd.DataFrame]":
        import pandas as pd

        from gemmpipe import table

        kept = self._kept(courses, context)
        rows = []
        for course in courses:
            for candidate in kept[course.problem.id]:
                trial = course.results[candidate]
                rows.append(_shortlist_row(course, candidate, trial, context))
        trials = [t for c in courses for t in c.results.values()]
        names = context.journal.kernel_names
        passed_over = passed_over_frame([c.outline for c in courses], names)
        counts = Counter(str(t.status) for t in trials)
        for course in courses:
            counts.update(course.outline.passed_over["status"])
        summary = ", ".join(f"{n:,} {status}" for status, n in counts.most_common()) or "no candidate"
        context.events.emit(
            "line", f"screen: {counted(len(courses), 'problem')}, {summary}; {len(rows):,} go on to bench"
        )
        return {
            "shortlist": pd.DataFrame(rows, columns=list(table.SHORTLIST)),
            "trials": pd.concat([passed_over, trial_frame(trials, names)], ignore_index=True),
        }

    def _kept(self, courses: list[Course], context: Context) -> dict[str, list[Candidate]]:
        keep = Keep(fastest=self.keep, margin_pct=self.margin_pct, per_bucket=self.bucket_keep)
        library = context.family.baseline
        kept = {
            c.problem.id: dict.fromkeys(shortlist(c.results, keep, context.incumbents.get(c.problem.id, ()), library))
            for c in courses
        }
        for group in siblings(courses):
            problems = [c.problem for c in group]
            results = {c.problem.id: c.results for c in group}
            leaders = bucket_shortlists(problems, results, all_buckets(problems, context), self.bucket_keep)
            for problem_id, candidates in leaders.items():
                kept[problem_id].update(dict.fromkeys(candidates))
        return {problem_id: list(candidates) for problem_id, candidates in kept.items()}


def _course(begun: Begun, context: Context) -> Course:
    """The way of a problem that is listed through this stage."""
    recall = Recall(own=context.record, earlier=context.earlier, kernel_names=begun.kernel_names)
    return Course(begun, recall, context.search.budget_trials)


def _look_around(scheduler: Scheduler, context: Context) -> None:
    context.check()
    context.events.emit("progress", f"{scheduler.trials} trials", done=scheduler.over)


def _mark(courses: list[Course], context: Context) -> None:
    """Remember, also for who goes on with this run, whose search was cut short."""
    for course in courses:
        problem = course.problem.id
        if course.cut:
            context.journal.write("cut", problem=problem)
            context.cut.add(problem)
        elif problem in context.cut:
            context.journal.write("whole", problem=problem)
            context.cut.discard(problem)
    if any(c.cut for c in courses):
        searches = counted(sum(c.cut for c in courses), "search", "searches")
        context.events.emit("line", f"screen: {searches} cut short by the budget; their rows are provisional")


def _deadline(context: Context) -> float | None:
    """When the budget of this run's screening is spent, on the monotonic clock."""
    budget_s = context.search.budget_s
    return None if budget_s is None else time.monotonic() + budget_s - context.account.get("screen_s", 0.0)


def _own(context: Context) -> set[str]:
    """Labels of the family's own kernels, whose results nobody has checked yet; an engine's stand-in is one."""
    engines = [context.form.implementation] if context.form is not None else []
    return {i.label for i in (*context.family.implementations, *engines)}


def _in_order(problems: list[Problem], context: Context) -> list[Problem]:
    """Siblings together, since they share weights; the expensive first where several devices have to end together."""
    if len(context.pool.devices) == 1:
        return sorted(problems, key=lambda p: (str(p.siblings), p.rows))
    return sorted(problems, key=lambda p: (-work(context.family.spec(p)), p.id))


def _account_idle(context: Context, begun: float) -> None:
    """How long devices waited: for their workers to start, and while a build was pending (first done to last)."""
    ready = [u.ready_at for u in context.pool.usage()[1:] if u.ready_at is not None]
    started_s = max([at - begun for at in ready if at > begun], default=0.0)
    context.account.setdefault("idle_until_workers_ready_s", started_s)
    done = context.pool.builds_done
    if done:
        devices = context.pool.usage()[1:]
        idle_s = sum(u.idle_within(done[0], done[-1]) for u in devices) / len(devices)
        context.account["idle_while_builds_pending_s"] = idle_s


def all_buckets(problems: list[Problem], context: Context) -> list[Bucket]:
    """Every bucket that the chosen formats ask for, for problems that differ in M alone; engines' have a search."""
    ms, apart = sorted(p.rows for p in problems), {form.name for form in context.forms}
    return [b for name, f in context.formats if name not in apart for b in f.buckets(context.family, ms)]


def _shortlist_row(course: Course, candidate: Candidate, trial: Trial, context: Context) -> dict[str, object]:
    incumbent = candidate in context.incumbents.get(course.problem.id, ())
    library = candidate.backend in context.family.baseline
    return {
        "problem": course.problem.id,
        "candidate": candidate.id,
        "libtype": candidate.backend,
        "config": config_text(candidate),
        "role": "incumbent" if incumbent else "library" if library else "",
        "status": str(trial.status),
        "us": trial.time_us,
        "reason": trial.error,
    }
