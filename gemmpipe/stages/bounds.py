"""A product never gets faster by more rows: what a candidate took at a smaller M bounds what it takes here."""

from collections.abc import Collection, Iterable

from gemmpipe.data import Candidate, Problem, Scalar, Status, Trial

_LONG_US = 5_000.0
_DROP_RATIO = 1.5


class Bounds:
    """Drops slow candidates of long problems without running them at all."""

    def __init__(self, library: Collection[str], own: Collection[str]) -> None:
        self._library = library
        self._own = own  # not checked yet: a kernel that computes nothing must not show that others are hopeless
        self._known: dict[tuple[tuple[tuple[str, Scalar], ...], Candidate], list[tuple[int, float]]] = {}
        self._long: set[tuple[tuple[str, Scalar], ...]] = set()
        self._extra: dict[tuple[tuple[tuple[str, Scalar], ...], Candidate], int] = {}

    def learn(self, problem: Problem, trial: Trial) -> None:
        """A time measured at this problem's M, and the weight memory it took."""
        if trial.time_us is not None:
            key = (problem.siblings, trial.candidate)
            self._known.setdefault(key, []).append((problem.rows, trial.time_us))
            self._extra[key] = trial.extra_weight_bytes
            if trial.time_us > _LONG_US:
                self._long.add(key[0])

    def bound_us(self, problem: Problem, candidate: Candidate) -> float:
        """The longest time at an M no larger; 0 where none is known."""
        known = self._known.get((problem.siblings, candidate), ())
        return max((t for m, t in known if m <= problem.rows), default=0.0)

    def is_long(self, problem: Problem, candidate: Candidate) -> bool:
        """Whether one launch is so long that asking first whether it can win pays."""
        # The scheduler asks for everything that is ready; most products have no long candidate at all.
        return bool(self._long) and problem.siblings in self._long and self.bound_us(problem, candidate) > _LONG_US

    def hopeless(self, problem: Problem, candidate: Candidate, results: Iterable[Trial]) -> Trial | None:
        """A `dropped` trial when the bound is beyond what is reached here with no more weight memory."""
        bound = self.bound_us(problem, candidate)
        extra = self._extra.get((problem.siblings, candidate), 0)
        trusted = [t for t in results if t.candidate.backend not in self._own]
        rivals = [t.time_us for t in trusted if t.time_us is not None and t.extra_weight_bytes <= extra]
        if not rivals or bound <= max(_LONG_US, _DROP_RATIO * min(rivals)):
            return None
        why = f"not run: took {bound:.0f} us with fewer rows, {min(rivals):.0f} us is reached here"
        return Trial(stage="screen", problem=problem.id, candidate=candidate, status=Status.DROPPED, error=why)

    def spared(self, problem: Problem, candidates: Collection[Candidate]) -> Candidate | None:
        """The library candidate with the least bound: the baseline is measured, however slow."""
        library = [c for c in candidates if c.backend in self._library]
        return min(library, key=lambda c: (self.bound_us(problem, c), c.id), default=None)
