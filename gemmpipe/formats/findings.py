"""What a check of a file found: a line for the user, and how serious it is."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.core.errors import printable
from gemmpipe.core.events import counted

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
"""An error: the engine fails, computes wrong results or never reads it. A warning: it works, worse than it could."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong with a file, or with one of its entries."""

    path: Path
    key: str = ""
    """The entry, as the file has it; nothing: the file as a whole."""
    severity: str
    text: str
    remedy: str

    @property
    def line(self) -> str:
        """`file: key: severity: what; what to do`."""
        where = f"{self.path}: {self.key}" if self.key else str(self.path)
        return printable(f"{where}: {self.severity}: {self.text}; {self.remedy}")


def summary(files: int, findings: Iterable[Finding]) -> str:
    """`lint: 3 files: 1 error, 2 warnings in 2 of them`."""
    found = list(findings)
    counts = [(name, sum(each.severity == name for each in found)) for name in SEVERITIES]
    said = ", ".join(counted(number, name) for name, number in counts if number)
    touched = len({each.path for each in found if each.severity != NOTE})
    where = f"; {touched} of them not clean" if touched else ""
    return f"lint: {counted(files, 'file')}: {said or 'nothing found'}{where}"
