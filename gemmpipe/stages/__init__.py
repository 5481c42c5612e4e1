"""What a stage is: a step from tables to tables, with what all steps of a run share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.data import Device, Scalar
from gemmpipe.events import Events
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.formats import Format
from gemmpipe.sources import Source

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every stage of a run may ask for."""

    family: Family
    defaults: KernelDefaults
    source: Source
    formats: tuple[tuple[str, Format], ...]
    """(the name in the configuration, the format)."""
    output: Path
    """The folder of the artifacts."""
    device: Device
    retune: bool
    events: Events
    run_id: str
    provenance: Mapping[str, Scalar | Mapping[str, Scalar]]
    """Versions, clocks and recipe: goes beside every artifact."""


class Stage(ABC):
    """A step of a pipeline: reads the tables it needs, returns the tables it gives."""

    needs: ClassVar[tuple[str, ...]]
    gives: ClassVar[tuple[str, ...]]

    @abstractmethod
    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """The tables of `gives`, from those of `needs`."""
