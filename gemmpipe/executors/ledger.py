"""Which candidates ended workers on which problems: what one desk learnt, no other has to learn again."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gemmpipe.data import Candidate, Status, Trial

_CONDEMNED = 3  # on so many problems it ended its worker, and on none it lived: it is not run on others


@dataclass(kw_only=True)
class Ledger:
    """Shared by the desks of a run."""

    _ended: dict[str, dict[str, str]] = field(default_factory=dict)
    """By candidate id: problem id -> how its worker ended."""
    _lived: set[str] = field(default_factory=set)

    def enter(self, candidate: Candidate, problem: str, why: str) -> None:
        """The candidate ended its worker on this problem, alone."""
        self._ended.setdefault(candidate.id, {})[problem] = why

    def hear(self, trials: Iterable[Trial]) -> None:
        """Remember who lives."""
        self._lived.update(t.candidate.id for t in trials if t.status in (Status.OK, Status.DROPPED))

    def suspects(self, candidate: Candidate, problem: str) -> bool:
        """Whether it ended a worker on another problem: here it goes alone first."""
        return any(other != problem for other in self._ended.get(candidate.id, ()))

    def verdict(self, candidate: Candidate) -> str:
        """Why the candidate is not run any more, or nothing."""
        ended = self._ended.get(candidate.id, {})
        if len(ended) < _CONDEMNED or candidate.id in self._lived:
            return ""
        return f"not run: it ended its worker on {len(ended)} other problems and lived on none: {[*ended.values()][-1]}"
