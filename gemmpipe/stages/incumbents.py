"""What the output table already holds for this device, as candidates to race against."""

from collections.abc import Iterable
from pathlib import Path

from gemmpipe.data import Candidate, Device
from gemmpipe.family import Family
from gemmpipe.formats import Format
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store


def native_tables(family: Family, output: Path, formats: Iterable[Format]) -> list[Path]:
    """The native tables of this output folder, written already or not."""
    return [path for each in formats if (path := each.table(family, output)) is not None]


def incumbents_of(
    family: Family, device: Device, output: Path, formats: Iterable[Format]
) -> dict[str, tuple[Candidate, ...]]:
    """By problem id; rows without knobs (another tool's) give none. Raises UserError for a broken table."""
    tables = [path for path in native_tables(family, output, formats) if path.is_file()]
    rows = [row for path in tables for row in store.read(path, family)]
    found: dict[str, tuple[Candidate, ...]] = {}
    for row in rows:
        if (row["gfx"], row["cu_num"]) != (device.gfx, device.cu_num) or not row.get("config"):
            continue
        key = tuple((c.name, row[c.name]) for c in family.key_columns)
        candidate = candidate_of(str(row["libtype"]), str(row["config"]))
        found[family.problem(key).id] = (candidate,)
    return found
