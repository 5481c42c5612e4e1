"""The rules that choose one finalist of a problem, and its comparison with baseline, incumbent and runner-up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemmpipe.bench.timer import PairedRatio, paired_ratio
from gemmpipe.core.data import NOISY, Candidate, median


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A candidate that passed the check, with one sample per round."""

    candidate: Candidate
    samples_us: tuple[float, ...]
    extra_weight_bytes: int
    err_ratio: float
    kernel_name: str
    complete: bool = True
    """True if it was timed in all rounds; a pruned one has times of the early rounds alone."""
    shared: bool = False
    """True if another process used the device during its rounds."""
    no_dependent_launch: bool = False
    """True if none preceded its replays, though the device has such launches."""

    @property
    def time_us(self) -> float:
        """The median sample."""
        return median(self.samples_us)


@dataclass(frozen=True, kw_only=True)
class SelectionRules:
    """The options of the select stage."""

    prefer: Mapping[str, float]
    min_improvement_pct: float
    tie_pct: float


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The chosen finalist and those it is compared with."""

    chosen: Finalist
    baseline: Finalist | None
    incumbent: Finalist | None
    runner_up: Finalist | None
    ratio: PairedRatio | None
    """Chosen over baseline."""
    noise_pct: float | None
    """Half the interval of the ratio of chosen and runner-up: by how much their medians may differ by chance; None
    with a single round, which has no noise estimate."""
    near_ties: int
    backend_ratios: Mapping[str, float]
    """By backend: its fastest finalist over the chosen one, in their common rounds; not the choice itself."""
    reason: str


def select_finalist(
    finalists: Sequence[Finalist], libraries: Sequence[str], incumbents: Sequence[Candidate], rules: SelectionRules
) -> Selection:
    """Chooses among finalists (at least one).

    The fastest, unless a preferred backend is within its ratio, the best library is faster in the rounds of both (and
    the choice is not of a preferred backend), or the incumbent is not slower than either by `min_improvement_pct` with
    an interval that excludes 1. The candidate's id decides between equal medians.
    """
    # Times on a shared device count only where there are no others.
    ranked = rank([f for f in finalists if not f.shared] or finalists)
    fastest = ranked[0]
    chosen, reason = _preferred(ranked, rules)
    baseline = next((f for f in ranked if f.candidate.backend in libraries), None)
    preferred = chosen.candidate.backend in rules.prefer
    if baseline is not None and not preferred and _is_behind(chosen, baseline):
        chosen, reason = baseline, "the library is faster in the rounds of both"
    incumbent = next((f for f in ranked if f.candidate in incumbents), None)
    if incumbent is not None and incumbent is not chosen:
        library = chosen if preferred or baseline is None else baseline
        others = [(chosen, reason), (library, "the library is faster than the incumbent")]
        better = (each for each in others if _improves(each[0], incumbent, rules))
        chosen, reason = next(better, (incumbent, "the incumbent is not beaten by enough"))
    runner_up = next((f for f in ranked if f is not chosen), None)
    return Selection(
        chosen=chosen,
        baseline=baseline,
        incumbent=incumbent,
        runner_up=runner_up,
        ratio=paired_ratio(chosen.samples_us, baseline.samples_us) if baseline else None,
        noise_pct=_noise_pct(chosen, runner_up) if runner_up else None,
        near_ties=sum(_ties(f, fastest, rules) for f in ranked if f is not fastest),
        backend_ratios=_backend_ratios(chosen, ranked),
        reason=reason,
    )


def _backend_ratios(chosen: Finalist, ranked: Sequence[Finalist]) -> dict[str, float]:
    others: dict[str, Finalist] = {}
    for finalist in ranked:
        if finalist is not chosen:
            others.setdefault(finalist.candidate.backend, finalist)
    return {name: _time_ratio(finalist, chosen) for name, finalist in others.items()}


def rank(finalists: Sequence[Finalist]) -> list[Finalist]:
    """Fastest first: those timed in all rounds, by the median of their ratio to one of them, then the pruned ones.

    Ratios are of the same rounds, because clocks drop under load: early rounds alone give too short a time.
    """
    reference = min(finalists, key=lambda f: (not f.complete, f.time_us, f.candidate.id))
    return sorted(finalists, key=lambda f: (not f.complete, _time_ratio(f, reference), f.candidate.id))


def _time_ratio(a: Finalist, b: Finalist) -> float:
    """The ratio of a to b by their common rounds; by their medians where the rounds contradict these.

    On a busy CPU samples vary by a hundred times: a finalist can be faster in most rounds of two and yet have a median
    several times that of the other.
    """
    paired = paired_ratio(a.samples_us, b.samples_us).median
    medians = a.time_us / b.time_us
    contradicts = (paired < 1 and medians > NOISY) or (paired > 1 and medians < 1 / NOISY)
    return medians if contradicts and a.complete == b.complete else paired


def _preferred(ranked: Sequence[Finalist], rules: SelectionRules) -> tuple[Finalist, str]:
    fastest = ranked[0]
    for finalist in ranked[1:]:
        limit = rules.prefer.get(finalist.candidate.backend)
        if limit is None or fastest.candidate.backend in rules.prefer:
            continue
        if _time_ratio(fastest, finalist) >= limit:
            return finalist, f"{finalist.candidate.backend} is preferred within {limit:g}"
    return fastest, ""


def _is_behind(chosen: Finalist, baseline: Finalist) -> bool:
    """True if a library is faster than the choice in their common rounds.

    Ranks come from ratios to a third finalist: where times vary much (a busy CPU), the median of the ratio of two can
    contradict those of both to the third.
    """
    return baseline.complete and _time_ratio(chosen, baseline) > 1


def _improves(new: Finalist, old: Finalist, rules: SelectionRules) -> bool:
    ratio = paired_ratio(new.samples_us, old.samples_us)
    return ratio.median <= 1 - rules.min_improvement_pct / 100 and ratio.high < 1


def _noise_pct(chosen: Finalist, runner_up: Finalist) -> float | None:
    if min(len(chosen.samples_us), len(runner_up.samples_us)) < 2:
        return None  # pruned after the first round
    return paired_ratio(chosen.samples_us, runner_up.samples_us).noise_pct


def _ties(finalist: Finalist, fastest: Finalist, rules: SelectionRules) -> bool:
    ratio = paired_ratio(finalist.samples_us, fastest.samples_us)
    return ratio.undecided and ratio.median <= 1 + rules.tie_pct / 100
