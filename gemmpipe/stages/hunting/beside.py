"""Hunts in processes beside the driver: who hunts what, what all of them hear, and who goes on when one dies."""

import pickle
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection, wait

from gemmpipe.data import BuildFacts, Problem, Trial
from gemmpipe.device import usable_cores
from gemmpipe.errors import EnvironmentProblem
from gemmpipe.events import Events
from gemmpipe.executors import Usage
from gemmpipe.family import GemmSpec
from gemmpipe.forkserver import PAUSES_S
from gemmpipe.search.lore import Lore
from gemmpipe.stages import Context
from gemmpipe.stages.hunting import Begun, Ground, Hunts, Quarry
from gemmpipe.stages.hunting.far import FarHunt
from gemmpipe.stages.hunting.here import Here
from gemmpipe.stages.hunting.hunter import Asked, Failed, News, Told
from gemmpipe.stages.hunting.process import HunterProcess

# One alone lists and thinks for as long as an H200 screens (aiter's space of 1,944 points, 2026-11-21).
_OF_A_DEVICE = 2
_AHEAD = 2  # problems that a hunter has to list: more would stand in front of what is asked of it


def hunts_for(context: Context) -> Hunts:
    """On a CPU in the driver; else beside it, two processes a device, with half of the cores left to the others."""
    if context.device.kind == "cpu":
        return Here(context.ground, context.lore)
    count = max(1, min(_OF_A_DEVICE * len(context.pool.devices), usable_cores() // 2))
    return Beside(context.ground, context.lore, count, context.events)


class Beside(Hunts):
    """Hunts in `count` processes, which start with the first problem."""

    def __init__(self, ground: Ground, lore: Lore, count: int, events: Events) -> None:
        self._ground, self._lore, self._count, self._events = ground, lore, count, events
        self._hunters: list[HunterProcess] = []
        self._left: deque[Quarry] = deque()
        self._hunts: dict[str, FarHunt] = {}
        self._begun: dict[str, Begun] = {}
        """By problem id."""
        self._new: list[Begun] = []
        self._heard_of: list[tuple[Problem, GemmSpec]] = []
        self._learnt: list[Trial] = []
        self._facts: dict[str, BuildFacts] = {}

    def begin(self, quarries: Sequence[Quarry]) -> None:
        if not self._hunters:
            self._hunters = [HunterProcess(self._ground, self._lore) for _ in range(self._count)]
        self._left.extend(quarries)
        self._feed()

    def begun(self) -> list[Begun]:
        new, self._new = self._new, []
        return new

    def learn(self, trial: Trial) -> None:
        self._lore.learn(trial)
        self._learnt.append(trial)

    def know(self, build: str, facts: BuildFacts) -> None:
        self._lore.facts[build] = self._facts[build] = facts

    def ears(self) -> Sequence[Connection | int]:
        return [each.pipe for each in self._hunters]

    def hear(self) -> list[str]:
        self._spread_news()
        heard = []
        speaking = wait(self.ears(), timeout=0)
        for each in [each for each in self._hunters if each.pipe in speaking]:
            for answer in each.answers():
                if isinstance(answer, Failed):
                    raise answer.error
                if answer is None:
                    self._replace(each)
                    break
                self._take(each, answer)
                heard.append(answer.problem)
        self._feed()
        return heard

    def _take(self, each: HunterProcess, asked: Asked) -> None:
        hunt, builds = self._hunts[asked.problem], each.builds_of(asked)
        known = self._begun.get(asked.problem)
        if asked.outline is not None:
            each.unlisted -= 1
        if known is None and asked.outline is not None:
            known = Begun(outline=asked.outline, hunt=hunt, builds={}, kernel_names={})
            self._begun[asked.problem] = known
            self._new.append(known)
            self._lore.hear(asked.outline.problem, asked.outline.spec)
            self._heard_of.append((asked.outline.problem, asked.outline.spec))
        if known is not None:
            known.builds.update(builds)
            known.kernel_names.update(asked.kernel_names)
            self._lore.tales[asked.problem].builds.update(asked.builds)
        hunt.heard(asked.requests, asked.over)
        if hunt.over:
            each.losses = 0
            del each.hunted[asked.problem], self._hunts[asked.problem], self._begun[asked.problem]

    def _feed(self) -> None:
        """Give problems to who has the fewest."""
        while self._left and (free := [h for h in self._hunters if h.unlisted < _AHEAD]):
            each, quarry = min(free, key=lambda h: len(h.hunted)), self._left.popleft()
            self._hunts[quarry.problem.id] = FarHunt(quarry.problem.id, partial(self._tell, each))
            self._give(each, quarry)

    def _tell(self, each: HunterProcess, message: Told) -> None:
        """In the order in which the driver learnt it, so that hunts here and beside decide alike."""
        self._spread_news()
        each.send(message)

    def _give(self, each: HunterProcess, quarry: Quarry) -> None:
        each.hunted[quarry.problem.id] = quarry
        each.unlisted += 1
        each.send(quarry)

    def _spread_news(self) -> None:
        """Once pickled for all; who asked for a result learns of it here too, for its other hunts."""
        if not (self._heard_of or self._learnt or self._facts):
            return
        builds = {
            (t.problem, t.candidate.id): self._lore.tales[t.problem].builds.get(t.candidate.id, ())
            for t in self._learnt
        }
        news = News(begun=tuple(self._heard_of), trials=tuple(self._learnt), builds=builds, facts=dict(self._facts))
        pickled = pickle.dumps(news, pickle.HIGHEST_PROTOCOL)
        for each in self._hunters:
            each.send_pickled(pickled)
        self._heard_of, self._learnt, self._facts = [], [], {}

    def _replace(self, each: HunterProcess) -> None:
        """Its hunts go on in a new process: what was timed is told again as it is asked for."""
        how = each.end()
        each.losses += 1
        if each.losses > len(PAUSES_S):  # with no hunt ended in between: it cannot go on
            raise EnvironmentProblem(f"a process that searches died {each.losses} times in a row: {how}")
        self._events.emit(
            "warning", f"a process that searches died ({how}); its {len(each.hunted)} searches begin anew"
        )
        time.sleep(PAUSES_S[each.losses - 1] if each.losses > 1 else 0)
        each.start()
        each.unlisted = 0
        for quarry in each.hunted.values():
            self._hunts[quarry.problem.id].begin_anew()
            self._give(each, quarry)

    def usage(self) -> list[Usage]:
        if not self._hunters:
            return []
        whole = Usage(name=f"search processes ({len(self._hunters)})")
        for each in self._hunters:
            whole.take_in(each.usage())
        return [whole]

    def close(self) -> None:
        for each in self._hunters:
            each.end()
        self._hunters = []
