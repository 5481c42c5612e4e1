"""What the output table already holds for this device, as candidates to race against."""

from collections.abc import Mapping
from pathlib import Path

from gemmpipe import store
from gemmpipe.data import Candidate, Device, Problem
from gemmpipe.family import Family
from gemmpipe.formats import Format
from gemmpipe.stages.rows import candidate_of


def native_table(family: Family, output: Path, formats: Mapping[str, Format]) -> Path:
    """Where the native table of this run lies, written by the format `csv` or not."""
    named = getattr(formats.get("csv"), "file", None)
    return output / (named or family.csv_name)


def incumbents_of(
    family: Family, device: Device, output: Path, formats: Mapping[str, Format]
) -> dict[str, tuple[Candidate, ...]]:
    """By problem id; rows without knobs (another tool's) give none. Raises UserError for a broken table."""
    path = native_table(family, output, formats)
    if not path.is_file():
        return {}
    found: dict[str, tuple[Candidate, ...]] = {}
    for row in store.read(path, family):
        if (row["gfx"], row["cu_num"]) != (device.gfx, device.cu_num) or not row.get("config"):
            continue
        key = tuple((c.name, row[c.name]) for c in family.key_columns)
        candidate = candidate_of(str(row["libtype"]), str(row["config"]))
        found[Problem(family=family.name, key=key).id] = (candidate,)
    return found
