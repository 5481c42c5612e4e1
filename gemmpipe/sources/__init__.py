"""What a source is: where problems come from."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from gemmpipe.data import Problem
from gemmpipe.family import Family, KernelDefaults


class Source(ABC):
    """A provider of problems; constructing it reads nothing."""

    @abstractmethod
    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, weights summed. Raises UserError: file, row, column, what was expected."""

    def left_out(self, family: Family, defaults: KernelDefaults, gfx: str) -> str:
        """What it holds beside these problems, for other kernels; a clause for the reader, or nothing."""
        return ""

    def recorded_us(self, family: Family, defaults: KernelDefaults, gfx: str) -> Mapping[str, float]:
        """By problem id, the time that all calls took together, where the source knows it."""
        return {}
