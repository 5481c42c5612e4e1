"""Findings of a file check: a line for the user and its severity."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.core.errors import printable
from gemmpipe.core.events import counted

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
"""An error: the engine fails, computes wrong results or never reads the file. A warning: it works, but slower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A defect of a file or of one of its entries."""

    path: Path
    key: str = ""
    """The entry's name in the file; empty: the file as a whole."""
    severity: str
    text: str
    remedy: str

    @property
    def line(self) -> str:
        """`file: key: severity: defect; remedy`."""
        where = f"{self.path}: {self.key}" if self.key else str(self.path)
        return printable(f"{where}: {self.severity}: {self.text}; {self.remedy}")


def summary(files: int, findings: Iterable[Finding]) -> str:
    """`lint: 3 files: 1 error, 2 warnings in 2 of them, 1 note`."""
    found = list(findings)
    counts = [(name, sum(each.severity == name for each in found)) for name in SEVERITIES if name != NOTE]
    defects = ", ".join(counted(number, name) for name, number in counts if number)
    touched = len({each.path for each in found if each.severity != NOTE})
    where = f" in {touched} of them" if defects and files > 1 else ""
    notes = sum(each.severity == NOTE for each in found)
    parts = [*([f"{defects}{where}"] if defects else []), *([counted(notes, NOTE)] if notes else [])]
    return f"lint: {counted(files, 'file')}: {', '.join(parts) or 'nothing found'}"
