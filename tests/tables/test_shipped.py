"""The shipped tables: each row can be read, fits, and was tuned with the kernels as they are now."""

import json
import shutil
from pathlib import Path

import pytest
from shipped_rows import SHIPPED_DEVICE, copy_rows

from gemmpipe.core.data import Device, Problem
from gemmpipe.core.device import arch_device
from gemmpipe.core.paths import shipped_tables
from gemmpipe.family import load_family
from gemmpipe.runtime.select import usable_candidate
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store
from gemmpipe.templates.hopper.constraints import views_of_parts

SHIPPED = ("a16w16", "a8w8_blockscale", "fmoe")


def test_the_tables_of_the_results_are_shipped(h200_tables: Path) -> None:
    names = {load_family(name).csv_name for name in SHIPPED}
    assert {path.name for path in h200_tables.glob("*.csv")} >= names


def test_rows_of_a_run_in_this_checkout_are_left_out(h200_tables: Path, tmp_path: Path) -> None:
    added, copied = tmp_path / "added", tmp_path / "copied"
    shutil.copytree(h200_tables, added)
    copied.mkdir()
    table = added / load_family("a8w8_blockscale").csv_name
    header, first, *others = table.read_text().splitlines(keepends=True)
    of_cpu = first.replace("sm_90,132", "cpu_avx512,2").replace("NVIDIA H200", "AMD EPYC")
    table.write_text("".join([header, of_cpu, first, *others]))
    (added / "a8w8_tuned_gemm.csv").write_text(header + of_cpu)
    notes = table.with_name(f"{table.name}.meta.json")
    written = json.loads(notes.read_text())
    written["runs"]["later"] = {"device": "AMD EPYC"}
    notes.write_text(json.dumps(written))
    copy_rows(added, copied)
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == {
        path.name: path.read_bytes() for path in h200_tables.iterdir()
    }


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(("tag", "model"), [("", SHIPPED_DEVICE), ("_h100", "NVIDIA H100 80GB HBM3")])
def test_every_row_names_a_kernel_that_is_still_the_same(name: str, tag: str, model: str, tmp_path: Path) -> None:
    family = load_family(name)
    copy_rows(shipped_tables(), tmp_path, model)
    table = Path(family.csv_name)
    rows = store.read(tmp_path / f"{table.stem}{tag}{table.suffix}", family)
    assert len(rows) >= 20
    for row in rows:
        device: Device = arch_device(str(row["gfx"]))
        candidate = candidate_of(str(row["libtype"]), str(row["config"]))
        own = [i for i in family.implementations if i.label == candidate.backend]
        key = tuple((c.name, row[c.name]) for c in family.key_columns)
        spec = family.spec(Problem(family=family.name, key=key))
        for implementation in own:
            reason = implementation.unsupported_reason(spec, candidate.knobs, device)
            if reason is not None and not views_of_parts() and reason.startswith("compiler:"):
                continue  # Triton 3.8 lacks these tiles: another row or choice answers
            assert reason is None, row
            assert implementation.kernel_name(candidate.knobs) == row["kernelName"], row
            assert usable_candidate(family, row, spec, device).candidate == candidate, (
                "the run time uses the row unchanged"
            )
