"""What sources share that read products of any family out of files which other programs wrote."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import UserError
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.files.csvfile import named_files
from gemmpipe.problem import make_problem, unite
from gemmpipe.sources import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """Equal products that a file tells of."""

    family: str
    values: Mapping[str, Scalar]
    """Key columns; without the rows where the file does not say them."""
    where: str
    count: float = 1.0
    time_us: float = 0.0
    """Of all of them together; 0 where the file does not tell."""


@dataclass(frozen=True, kw_only=True)
class Records(Source):
    """Products of the kernel's family, or with `rows_of` of that one, in the files that `path` names."""

    path: str | Sequence[str] | None
    rows_of: str | None

    _kept: dict[str, list[Recorded]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @abstractmethod
    def read(self, path: Path) -> list[Recorded]:
        """Every product in one file. Raises UserError: which file, which line, what was expected."""

    @abstractmethod
    def expected(self) -> str:
        """What a file is, for a user who named something else: `a CSV file`."""

    def sizes(self) -> list[int]:
        """The Ms of products whose rows the files do not say. Raises UserError naming shapes.nsets."""
        return []

    def problems(self, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Each problem once, weights summed. Raises UserError: which file, where in it, what was expected."""
        wanted = self.rows_of or family.name
        found = [
            problem
            for each in self.recorded()
            if each.family == wanted
            for problem in self._made(each, family, defaults, gfx)
        ]
        if not found:
            others = self.left_out(family, defaults, gfx)
            instead = f", but {others}" if others else f", expected {self.expected()}"
            raise UserError(f"shapes.path: no product of {wanted} there{instead}")
        return unite(found)

    def recorded_us(self, family: Family, defaults: KernelDefaults, gfx: str) -> Mapping[str, float]:
        """By problem id, the time that all its calls took together."""
        totals: dict[str, float] = {}
        for each in self.recorded():
            if each.family == (self.rows_of or family.name) and each.time_us:
                for problem in self._made(each, family, defaults, gfx):
                    totals[problem.id] = totals.get(problem.id, 0.0) + each.time_us
        return totals

    def left_out(self, family: Family, defaults: KernelDefaults, gfx: str) -> str:
        """How many products of other families there are."""
        counts: Counter[str] = Counter()
        for each in self.recorded():
            if each.family != (self.rows_of or family.name):
                counts[each.family] += int(each.count)
        return ", ".join(f"{count} of {name}" for name, count in counts.most_common())

    def recorded(self) -> list[Recorded]:
        """Everything in all files, which are read once."""
        if "all" not in self._kept:
            files = named_files("shapes.path", self.path, self.expected())
            self._kept["all"] = [each for path in files for each in self.read(path)]
        return self._kept["all"]

    def _made(self, each: Recorded, family: Family, defaults: KernelDefaults, gfx: str) -> list[Problem]:
        """Its problem, or one at each M where the file does not say the rows."""
        known = {name for column in family.key_columns for name in (column.name, *column.aliases)}
        values = {name: value for name, value in each.values.items() if name in known}
        # A reader says rows and types by one name each; families have their own for them.
        named = {
            column.name: values[name] for column in family.key_columns for name in column.aliases if name in values
        }
        values = {**named, **values}
        if family.rows_column in values:
            return [make_problem(family, values, defaults, gfx, each.where, each.count)]
        return [
            make_problem(family, {**values, family.rows_column: m}, defaults, gfx, each.where, each.count)
            for m in self.sizes()
        ]
