"""Problems from traces of torch's profiler that recorded shapes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemmpipe.data import Problem
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.problem import siblings, unite
from gemmpipe.sources.batch_sizes import batch_sizes
from gemmpipe.sources.profile import recorded
from gemmpipe.sources.records import Recorded, Records


@dataclass(frozen=True, kw_only=True)
class Trace(Records):
    """The products of Chrome traces (`torch.profiler` with record_shapes, .json or .json.gz), counted and timed.

    `nsets` adds these Ms to every product: a replayed CUDA graph leaves no operators in a trace, so that decode is
    missing there. Each is as frequent as the product was at the M it was seen at most.
    """

    nsets: Sequence[int] | int | str | None

    def read(self, path: Path) -> list[Recorded]:
        """Every product of one trace."""
        return recorded(path)

    def expected(self) -> str:
        """What a file is."""
        return "a trace of torch's profiler (.json or .json.gz)"

    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, its weight the number of calls. Raises UserError: which file, which event."""
        found = super().problems(family, defaults, gfx)
        if self.nsets is None:
            return found
        rows, made = family.rows_column, list(found)
        for group in siblings(found):
            most, seen = max(group, key=lambda p: p.weight), {p.rows for p in group}
            for m in batch_sizes(self.nsets):
                if m not in seen:
                    key = tuple((name, m if name == rows else value) for name, value in most.key)
                    made.append(replace(most, key=key))
        return unite(made)
