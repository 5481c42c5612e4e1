"""What a format is: a kind of artifact that engines load."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.data import Bucket, Device, Knobs, Scalar
from gemmpipe.events import Events
from gemmpipe.family import Family, GemmSpec
from gemmpipe.tables.uniting import Judge

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.backends.engine import EngineBackend


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where artifacts go and what is said about them."""

    folder: Path
    device: Device
    run_id: str
    provenance: Mapping[str, Scalar | Mapping[str, Scalar]]
    """Versions, clocks and recipe of the run: goes to the sidecar."""
    events: Events
    """Hears what was not stored, and why."""
    judge: Judge = Judge(device=None, changed=lambda row: False)
    """Decides between rows of several tables."""

    def warn(self, text: str) -> None:
        """Tell the user of something that may be lost on them."""
        self.events.emit("warning", text)


class Format(ABC):
    """A writer of artifacts; it decides nothing about candidates."""

    def buckets(self, family: Family, ms: Sequence[int]) -> tuple[Bucket, ...]:
        """The ranges of M for which it stores one candidate a (N, K), those without any of `ms` left out."""
        return ()

    def engine(self) -> "EngineBackend | None":
        """The engine that loads it, if it configures an engine's own function: that function is searched by itself."""
        return None

    def entries(self, spec: GemmSpec, device: Device, paths: Sequence[Path]) -> Mapping[int, Knobs]:
        """By M, in the order of the file: what stands for this product in the first of these files, or files in these
        folders, that has the name which the engine looks for. Raises UserError for a file that is none."""
        return {}

    def asks(self, family: Family) -> Mapping[str, tuple[str, ...]]:
        """By key of the configuration: the knobs that a candidate must have to be stored there."""
        return {}

    def table(self, family: Family, folder: Path) -> Path | None:
        """The native table that it keeps in this folder of artifacts, if it does."""
        return None

    def named(self, folder: Path) -> Path | None:
        """Where the file lies that the user gave a name, `file`, if it has one."""
        return None

    @abstractmethod
    def write(self, family: Family, selections: "pd.DataFrame", target: Target) -> list[Path]:
        """Store the selections (columns `table.SELECTIONS` and the family's key) beside what is there already.

        Rows with an empty `format` are the problems' own, the others those of this format's buckets. Returns the
        files written. Raises UserError for a file that someone broke by hand, which is left as it is, and
        EnvironmentProblem where it cannot write.
        """
