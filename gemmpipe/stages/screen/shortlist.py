"""The shortlist: which candidates of a problem go to the finals.

Also the candidates that problems which differ in M or in their routing alone try of each other after their searches.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from gemmpipe.bench.jobs import LONG_LAUNCH_US
from gemmpipe.bench.screening import PACE_RANK
from gemmpipe.core.data import Bucket, Candidate, Problem, Trial
from gemmpipe.family import GemmSpec
from gemmpipe.family.problem import group_by_shape
from gemmpipe.search import TrialRequest
from gemmpipe.stages import Context
from gemmpipe.stages.needed_builds import screening_builds
from gemmpipe.stages.screen.state import ProblemState


def shortlist(
    results: Mapping[Candidate, Trial],
    *,
    keep: int,
    margin_pct: float,
    always: Collection[Candidate] = (),
    library: Collection[str] = (),
) -> list[Candidate]:
    """The fastest, the best of each backend (with and without extra weight memory), and those of `always`.

    The fastest are at most `keep`, within `margin_pct` of the fourth and of the fastest library path without extra
    weight memory. Candidates with the most launches come first, as times of few launches are not comparable with these.
    Times of backends in `library` are trusted: their results are known to be right.
    """
    timed = [t for t in results.values() if t.time_us is not None]
    ordered = sorted(timed, key=_rank)
    # Not of the first: results are not checked yet, and a kernel that computes nothing is the fastest.
    pace_us = max((t.time_us or 0.0 for t in ordered[:PACE_RANK]), default=0.0)
    trusted = [t for t in ordered if t.candidate.backend in library and not t.extra_weight_bytes]
    pace_us = min([pace_us, *(t.time_us or 0.0 for t in trusted)])
    near = [t.candidate for t in ordered if (t.time_us or 0.0) <= pace_us * (1 + margin_pct / 100)]
    chosen = dict.fromkeys(near[:keep])
    best: dict[tuple[str, bool], Candidate] = {}
    for trial in ordered:
        best.setdefault((trial.candidate.backend, trial.extra_weight_bytes > 0), trial.candidate)
    libraries = [t for t in ordered if t.candidate.backend in library]
    chosen = dict.fromkeys(c for c in [*chosen, *best.values()] if not _is_hopeless(results[c], libraries))
    chosen.update(dict.fromkeys(c for c in always if c in results))
    return list(chosen)


_HOPELESS_RATIO = 2.0


def _is_hopeless(trial: Trial, libraries: Sequence[Trial]) -> bool:
    """True if a library path with no more weight memory is far faster.

    Only of long launches, a single one of which is its own average: on a CPU the finals would launch it for seconds.
    """
    least_us = (trial.time_us or 0.0) / _HOPELESS_RATIO
    return (trial.time_us or 0.0) >= LONG_LAUNCH_US and any(
        (t.time_us or 0.0) < least_us and t.extra_weight_bytes <= trial.extra_weight_bytes for t in libraries
    )


def _rank(trial: Trial) -> tuple[int, float, str]:
    return -trial.effective_launches, trial.time_us or 0.0, trial.candidate.id


def fastest(results: Mapping[Candidate, Trial], count: int) -> list[Candidate]:
    """The first `count` candidates, those with the most launches before the others."""
    timed = [t for t in results.values() if t.time_us is not None]
    return [t.candidate for t in sorted(timed, key=_rank)[:count]]


def bucket_shortlists(
    problems: Sequence[Problem],
    results: Mapping[str, Mapping[Candidate, Trial]],
    buckets: Sequence[Bucket],
    bucket_keep: int,
) -> dict[str, list[Candidate]]:
    """By problem id, the leaders of the buckets that the problem belongs to; `problems` differ in M alone.

    The `bucket_keep` leaders of a bucket have the least call-weighted sum of screening times among the candidates that
    its format can store and that are timed at every M.
    """
    chosen: dict[str, list[Candidate]] = {p.id: [] for p in problems}
    for bucket in buckets:
        inside = [p for p in problems if bucket.contains(p.rows)]
        if not inside:
            continue
        common = set.intersection(*({c for c, t in results[p.id].items() if t.time_us is not None} for p in inside))
        sums = {
            c: sum(p.weight * (results[p.id][c].time_us or 0.0) for p in inside) for c in common if bucket.accepts(c)
        }
        leaders = sorted(sums, key=lambda c: (sums[c], c.id))[:bucket_keep]
        for problem in inside:
            chosen[problem.id] += leaders
    return chosen


def bucket_leaders(bucket: Bucket, results: Sequence[Mapping[Candidate, Trial]], per_m: int) -> list[Candidate]:
    """The fastest `per_m` candidates that the bucket's format can store, at each of its Ms."""
    found: list[Candidate] = []
    for by_candidate in results:
        timed = [t for t in by_candidate.values() if t.time_us is not None and bucket.accepts(t.candidate)]
        found += [t.candidate for t in sorted(timed, key=_rank)[:per_m]]
    return list(dict.fromkeys(found))


_REACH = 2  # Ms on either side
_MOST_LEADERS = 8  # of the routings of one product


def shape_group_states(states: Sequence[ProblemState]) -> list[list[ProblemState]]:
    """Groups of problems that differ in M alone, M ascending."""
    return [sorted(group, key=lambda s: s.problem.rows) for group in group_by_shape(states, lambda s: s.problem)]


def cross_evaluate(
    states: Sequence[ProblemState], context: Context
) -> Iterator[tuple[ProblemState, list[TrialRequest]]]:
    """Requests for the fastest candidate of each of the nearest Ms, for problems that have not timed it.

    Of a mixture of experts also the fastest under other routings of the run. A search that ends early does not have
    the results of later ones: on an H200 one of 72 problems was 8 % slower than its neighbours' choice. Searches with a
    budget of trials get no extra ones.
    """
    if context.search.budget_trials is not None:
        return
    leaders = {state.problem.id: fastest(state.results, 1) for state in states}
    of_routings = _leaders_of_routings(states, leaders)
    for group in shape_group_states(states):
        for index, state in enumerate(group):
            near = group[max(0, index - _REACH) : index] + group[index + 1 : index + 1 + _REACH]
            found = dict.fromkeys(c for other in near for c in leaders[other.problem.id])
            found |= dict.fromkeys(of_routings[_without_routing(state.summary.spec)])
            launches = max((t.effective_launches for t in state.results.values()), default=0)
            missing = [c for c in found if c.id in state.summary.ids and c not in state.results]
            if missing and launches and not state.cut_short:
                yield state, [_request(state, c, launches, context) for c in missing]


def _leaders_of_routings(
    states: Sequence[ProblemState], leaders: Mapping[str, Sequence[Candidate]]
) -> dict[GemmSpec, list[Candidate]]:
    """By product without its routing, the candidates that lead under most routings."""
    counts: dict[GemmSpec, Counter[Candidate]] = {}
    for state in states:
        counts.setdefault(_without_routing(state.summary.spec), Counter()).update(leaders[state.problem.id])
    return {spec: [c for c, _ in each.most_common(_MOST_LEADERS)] for spec, each in counts.items()}


def _without_routing(spec: GemmSpec) -> GemmSpec:
    return spec if spec.experts is None else replace(spec, experts=replace(spec.experts, routing=None))


def _request(state: ProblemState, candidate: Candidate, launches: int, context: Context) -> TrialRequest:
    register_candidate(state, candidate, context)
    return TrialRequest(candidate=candidate, launches=launches)


def register_candidate(state: ProblemState, candidate: Candidate, context: Context) -> None:
    """Adds the builds and the kernel name of a candidate that the search may not have requested."""
    implementation = context.implementation(candidate.backend)
    if candidate.id not in state.builds and implementation is not None:
        knobs, spec = candidate.knobs, state.summary.spec
        state.builds[candidate.id] = screening_builds(implementation, spec, knobs, context.device)
        state.kernel_names[candidate.id] = implementation.kernel_name(knobs)
