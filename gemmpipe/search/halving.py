"""Successive halving (Jamieson and Talwalkar, 2016): a glance at everything, longer looks at what is left."""

from dataclasses import dataclass

from gemmpipe.search import Hunt, Request, Search, Subject
from gemmpipe.search.looks import Ladder, Looks
from gemmpipe.search.steps import GlanceHunt


@dataclass(frozen=True, kw_only=True)
class Halving(Search):
    """Glances at all candidates, then `looks` closer at fewer and fewer of them."""

    looks: Looks

    def start(self, subject: Subject) -> Hunt:
        ladder = Ladder(self.looks, subject.keep)
        glances = [Request(candidate=c, launches=ladder.launches, glance=True) for c in subject.candidates]
        return GlanceHunt(glances, ladder)
