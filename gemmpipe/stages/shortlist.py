"""Who goes on to the finals of a problem."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gemmpipe.data import Bucket, Candidate, Problem, Trial

_PACE = 4


@dataclass(frozen=True, kw_only=True)
class Keep:
    """How many go on."""

    fastest: int
    """The fastest of a problem, whatever they are."""
    margin_pct: float
    """But only who is so near to the fourth, or to a library."""
    per_bucket: int
    """The fastest over all Ms of a bucket, among those its format can store."""


def shortlist(
    results: Mapping[Candidate, Trial], keep: Keep, incumbents: Collection[Candidate], library: Collection[str] = ()
) -> list[Candidate]:
    """The fastest, the best of each backend (with and without extra weight memory), and the incumbents.

    Those that were looked at longest come first: a glance is not compared with a long look. Times of backends in
    `library` are believed: who is behind such a path that takes no further memory of weights is none of the fastest.
    """
    timed = [t for t in results.values() if t.time_us is not None]
    ordered = sorted(timed, key=_rank)
    # Not of the first: nothing is checked yet, and a kernel that computes nothing is the fastest.
    pace_us = max((t.time_us or 0.0 for t in ordered[:_PACE]), default=0.0)
    believed = [t for t in ordered if t.candidate.backend in library and not t.extra_weight_bytes]
    pace_us = min([pace_us, *(t.time_us or 0.0 for t in believed)])
    near = [t.candidate for t in ordered if (t.time_us or 0.0) <= pace_us * (1 + keep.margin_pct / 100)]
    chosen = dict.fromkeys(near[: keep.fastest])
    best: dict[tuple[str, bool], Candidate] = {}
    for trial in ordered:
        best.setdefault((trial.candidate.backend, trial.extra_weight_bytes > 0), trial.candidate)
    chosen.update(dict.fromkeys(best.values()))
    chosen.update(dict.fromkeys(c for c in incumbents if c in results))
    return list(chosen)


def _rank(trial: Trial) -> tuple[int, float, str]:
    return -trial.look, trial.time_us or 0.0, trial.candidate.id


def fastest(results: Mapping[Candidate, Trial], count: int) -> list[Candidate]:
    """The first few, those that were looked at longest before the others."""
    timed = [t for t in results.values() if t.time_us is not None]
    return [t.candidate for t in sorted(timed, key=_rank)[:count]]


def bucket_shortlists(
    problems: Sequence[Problem],
    results: Mapping[str, Mapping[Candidate, Trial]],
    buckets: Sequence[Bucket],
    per_bucket: int,
) -> dict[str, list[Candidate]]:
    """For each problem, the candidates that lead a bucket it belongs to; `problems` differ in M alone.

    A bucket's leaders have the least call-weighted sum of screening times among those timed at every M.
    """
    chosen: dict[str, list[Candidate]] = {p.id: [] for p in problems}
    for bucket in buckets:
        inside = [p for p in problems if bucket.holds(p.rows)]
        if not inside:
            continue
        common = set.intersection(*({c for c, t in results[p.id].items() if t.time_us is not None} for p in inside))
        sums = {
            c: sum(p.weight * (results[p.id][c].time_us or 0.0) for p in inside) for c in common if bucket.admits(c)
        }
        leaders = sorted(sums, key=lambda c: (sums[c], c.id))[:per_bucket]
        for problem in inside:
            chosen[problem.id] += leaders
    return chosen


def bucket_leaders(bucket: Bucket, results: Sequence[Mapping[Candidate, Trial]], per_rows: int) -> list[Candidate]:
    """The fastest few that the bucket's format can store, of each of its Ms."""
    found: list[Candidate] = []
    for by_candidate in results:
        timed = [t for t in by_candidate.values() if t.time_us is not None and bucket.admits(t.candidate)]
        found += [t.candidate for t in sorted(timed, key=_rank)[:per_rows]]
    return list(dict.fromkeys(found))
