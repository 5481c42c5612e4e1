"""Random search: what any cleverer search has to beat."""

import random
from dataclasses import dataclass

from gemmpipe.errors import at_least
from gemmpipe.search import Hunt, Request, Search, Subject
from gemmpipe.search.looks import Ladder, Looks
from gemmpipe.search.steps import GlanceHunt


@dataclass(frozen=True, kw_only=True)
class Random(Search):
    """Glances at a `share` of the candidates (at least `least`), drawn by `seed`; then `looks` closer at the best."""

    share: float
    least: int
    seed: int
    looks: Looks

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.share, self.least)

    def start(self, subject: Subject) -> Hunt:
        given = dict.fromkeys(subject.given)
        others = [c for c in subject.candidates if c not in given]
        # By the problem's name, so that a resumed run draws the same.
        order = random.Random(f"{self.seed} {subject.problem.id}").sample(others, len(others))
        wanted = max(self.least, round(self.share * len(subject.candidates)))
        ladder = Ladder(self.looks, subject.keep)
        chosen = [*given, *order[: max(0, wanted - len(given))]]
        return GlanceHunt([Request(candidate=c, launches=ladder.launches, glance=True) for c in chosen], ladder)


def check_share(share: float, least: int) -> None:
    """Raises ValueError for a share of the candidates that is none."""
    if not 0 < share <= 1:
        raise ValueError(f"share={share:g}, expected above 0 and at most 1")
    at_least(1, least=least)
