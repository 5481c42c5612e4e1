"""Hunts in the driver: on a CPU, whose cores belong to what is timed."""

from collections import deque
from collections.abc import Sequence

from gemmpipe.data import BuildFacts, Trial
from gemmpipe.search.lore import Lore
from gemmpipe.stages.hunting import Begun, Ground, Hunts, Quarry


class Here(Hunts):
    """Lists one problem at each look."""

    def __init__(self, ground: Ground, lore: Lore) -> None:
        self._ground, self._lore = ground, lore
        self._left: deque[Quarry] = deque()

    def begin(self, quarries: Sequence[Quarry]) -> None:
        self._left.extend(quarries)

    def begun(self) -> list[Begun]:
        if not self._left:
            return []
        listing, subject = self._ground.set_out(self._left.popleft(), self._lore)
        hunt = self._ground.search.start(subject)
        return [Begun(outline=listing.outline(), hunt=hunt, builds=listing.builds, kernel_names=listing.kernel_names)]

    def learn(self, trial: Trial) -> None:
        self._lore.learn(trial)

    def know(self, build: str, facts: BuildFacts) -> None:
        self._lore.facts[build] = facts
