"""What problems that differ in M alone try of each other, once their searches are over."""

from collections.abc import Iterator, Sequence

from gemmpipe.data import Candidate
from gemmpipe.problem import by_siblings
from gemmpipe.search import Request
from gemmpipe.stages import Context
from gemmpipe.stages.course import Course
from gemmpipe.stages.needed_builds import screening_builds
from gemmpipe.stages.shortlist import fastest

_REACH = 2  # Ms on either side


def siblings(courses: Sequence[Course]) -> list[list[Course]]:
    """Courses whose problems differ in M alone, M ascending."""
    return [sorted(group, key=lambda c: c.problem.rows) for group in by_siblings(courses, lambda c: c.problem)]


def of_neighbours(courses: Sequence[Course], context: Context) -> Iterator[tuple[Course, list[Request]]]:
    """The fastest of the nearest Ms, for each that has not looked at it.

    A search that is over early knows nothing of what the others found later: on an H200 one of 72 problems lay 8 %
    behind what its neighbours had chosen. Who was given a number of trials has no further ones.
    """
    if context.search.budget_trials is not None:
        return
    for group in siblings(courses):
        for place, course in enumerate(group):
            near = group[max(0, place - _REACH) : place] + group[place + 1 : place + 1 + _REACH]
            found = dict.fromkeys(c for other in near for c in fastest(other.results, 1))
            look = max((t.look for t in course.results.values()), default=0)
            missing = [c for c in found if c.id in course.outline.ids and c not in course.results]
            if missing and look and not course.cut:
                yield course, [_request(course, c, look, context) for c in missing]


def _request(course: Course, candidate: Candidate, launches: int, context: Context) -> Request:
    tell_of(course, candidate, context)
    return Request(candidate=candidate, launches=launches)


def tell_of(course: Course, candidate: Candidate, context: Context) -> None:
    """What a course must know of a candidate that its search may never have asked for."""
    implementation = context.implementation(candidate.backend)
    if candidate.id not in course.builds and implementation is not None:
        knobs, spec = candidate.knobs, course.outline.spec
        course.builds[candidate.id] = screening_builds(implementation, spec, knobs, context.device)
        course.kernel_names[candidate.id] = implementation.kernel_name(knobs)
