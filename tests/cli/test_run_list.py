"""Screens of 40 columns: a run of the list has two lines, and its folder is whole."""

from pathlib import Path

import pytest

from gemmpipe.cli.run_list import lines
from gemmpipe.report.run_folder import RunFolder

FOLDER = Path("outputs/runs/compare/2026-11-25_22-17-05-341317")


def _run(**facts: object) -> RunFolder:
    given: dict[str, object] = {
        "folder": FOLDER,
        "pipeline": "compare",
        "state": "finished",
        "exit_code": 0,
        "started": "2026-11-25T22:17:05+00:00",
        "kernel": "a16w16",
        "shapes": "list",
        "device": "AMD EPYC",
        "solved": 0,
        "problems": 2,
        "wall_s": 12.1,
        "total_s": 12.1,
        "command": "gemmpipe compare kernel=a16w16 device=cpu shapes=llama8b",
        "sweep": None,
    }
    return RunFolder(**{**given, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [40, 50])
def test_a_run_has_its_whole_folder_and_its_facts_below(width: int) -> None:
    folder, facts = lines({FOLDER: _run()}, width)
    assert folder == "compare/2026-11-25_22-17-05-341317"
    assert facts.startswith("  finished  2  12.1 s  kernel=")
    assert len(facts) == width
    assert facts.endswith("...")


def test_at_60_columns_it_is_a_table() -> None:
    header, row = lines({FOLDER: _run()}, 60)
    assert header.split()[0] == "folder"
    assert row.startswith("compare/2026-11-25_22-17-05-341317  finished")
    assert len(row) <= 60
