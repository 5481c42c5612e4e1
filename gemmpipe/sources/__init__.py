"""What a source is: where problems come from."""

from abc import ABC, abstractmethod

from gemmpipe.data import Problem
from gemmpipe.family import Family, KernelDefaults


class Source(ABC):
    """A provider of problems; constructing it reads nothing."""

    @abstractmethod
    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, weights summed. Raises UserError: file, row, column, what was expected."""
