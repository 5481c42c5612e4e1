"""The table across the jobs of a sweep."""

import json
import shlex
from pathlib import Path

from gemmpipe.cli.sweep_table import SweepJob, table_lines


def _job(folder: Path, number: int, search: str, mean: float | None) -> SweepJob:
    run = folder / str(number)
    run.mkdir()
    if mean is not None:
        regime = {"label": "M <= 64", "speedup": {"mean": mean}}
        manifest = {"wall_s": 12.34, "figures": {"products": 3, "regimes": [regime]}}
        (run / "manifest.json").write_text(json.dumps(manifest))
    return SweepJob(number=number, overrides=("kernel=a16w16", f"search={search}"), folder=run)


def test_jobs_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    jobs = [(_job(tmp_path, 0, "halving", 1.5), 0), (_job(tmp_path, 1, "random", None), 3)]
    assert table_lines(jobs, 120) == [
        "job  exit    time  products  M <= 64  options",
        "  0     0  12.3 s         3    1.50x  search=halving",
        "  1     3       -         -        -  search=random",
    ]


def test_a_header_can_be_copied_into_a_shell(tmp_path: Path) -> None:
    overrides = ("kernel=a16w16", "shapes.items=[{M:[1,64],N:512}]", "output=my tables")
    header = SweepJob(number=3, overrides=overrides, folder=tmp_path).header
    label, _, arguments = header.partition(": ")
    assert label == "job 3"
    assert tuple(shlex.split(arguments)) == overrides
    assert "'shapes.items=[{M:[1,64],N:512}]'" in arguments, "braces and brackets are the shell's own"


def test_a_damaged_manifest_is_a_job_without_figures(tmp_path: Path) -> None:
    job = _job(tmp_path, 0, "halving", None)
    (job.folder / "manifest.json").write_text('{"figures": [], "wall_s": "long"}')
    assert table_lines([(job, 0), (job, 0)], 120)[1].split() == ["0", "0", "-", "-"]


def test_shared_times_are_marked_and_reused_rows_counted(tmp_path: Path) -> None:
    first, second = _job(tmp_path, 0, "halving", 1.5), _job(tmp_path, 1, "random", None)
    regime = {"label": "M <= 64", "speedup": {"mean": 1.5}, "shared": 2}
    (first.folder / "manifest.json").write_text(json.dumps({"figures": {"products": 3, "regimes": [regime]}}))
    (second.folder / "manifest.json").write_text(json.dumps({"figures": None, "reused": {"problems": 2}}))
    rows = table_lines([(first, 0), (second, 0)], 120)[1:]
    assert "~1.5x" in rows[0]
    assert "2 reused" in rows[1]
