"""The shipped tables: each row can be read, fits, and was tuned with the kernels as they are now."""

from pathlib import Path

import pytest

from gemmpipe.core.data import Device, Problem
from gemmpipe.core.device import arch_device
from gemmpipe.core.paths import PACKAGE, shipped_tables
from gemmpipe.family import Family, load_family
from gemmpipe.runtime.select import usable_candidate
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store

FAMILIES = sorted(path.parent.name for path in (PACKAGE / "kernels").glob("*/__init__.py"))


def tables() -> list[tuple[Family, Path]]:
    families = [load_family(name) for name in FAMILIES]
    return [(f, p) for f in families if (p := shipped_tables() / f.csv_name).is_file()]


def test_the_tables_of_the_results_are_shipped() -> None:
    assert {"a16w16", "a8w8_blockscale"} <= {family.name for family, _ in tables()}


@pytest.mark.parametrize("name", [family.name for family, _ in tables()])
def test_every_row_names_a_kernel_that_is_still_the_same(name: str) -> None:
    family, path = next((f, p) for f, p in tables() if f.name == name)
    for row in store.read(path, family):
        if str(row["gfx"]).startswith("cpu"):
            continue  # this checkout's own run, on a machine without a GPU
        device: Device = arch_device(str(row["gfx"]))
        candidate = candidate_of(str(row["libtype"]), str(row["config"]))
        own = [i for i in family.implementations if i.label == candidate.backend]
        key = tuple((c.name, row[c.name]) for c in family.key_columns)
        spec = family.spec(Problem(family=family.name, key=key))
        for implementation in own:
            assert implementation.unsupported_reason(spec, candidate.knobs, device) is None, row
            assert implementation.kernel_name(candidate.knobs) == row["kernelName"], row
            assert usable_candidate(family, row, spec, device).candidate == candidate, (
                "the run time uses the row unchanged"
            )
