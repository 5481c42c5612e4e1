"""The rows of the shipped tables as they are shipped: a run in this checkout adds rows of its own machine to them."""

import csv
import json
from pathlib import Path

SHIPPED_DEVICE = "NVIDIA H200"


def copy_rows(source: Path, folder: Path, device: str = SHIPPED_DEVICE) -> None:
    """Copy the tables of a folder (`*.csv` and their `.meta.json`) that have rows of a device; no other row or run."""
    for table in source.glob("*.csv"):
        header, *lines = table.read_text().splitlines(keepends=True)
        column = next(csv.reader([header])).index("device")
        own = [line for line in lines if next(csv.reader([line]))[column] == device]
        if not own:
            continue
        (folder / table.name).write_text("".join([header, *own]))
        notes = json.loads(table.with_name(f"{table.name}.meta.json").read_text())
        notes["runs"] = {name: run for name, run in notes["runs"].items() if run["device"] == device}
        (folder / f"{table.name}.meta.json").write_text(json.dumps(notes, indent=2, sort_keys=True))
