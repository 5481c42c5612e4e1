"""The list of runs from 40 to 120 columns: the folder is whole, and what was solved and gained is there."""

import json
from pathlib import Path

import pytest

from gemmpipe.cli.run_list import lines
from gemmpipe.report.run_folder import RunFolder, describe_run

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


TUNED = {"folder": Path("outputs/runs/tune/2026-11-25_22-17-05-341317"), "pipeline": "tune", "chooses": True}
TUNED |= {"solved": 71, "problems": 72, "speedup": 1.384, "command": f"gemmpipe tune kernel=a8w8 {'x' * 90}"}


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_what_was_solved_and_gained_is_shown_at_every_width(width: int) -> None:
    found = lines({FOLDER: _run(), TUNED["folder"]: _run(**TUNED, approximate=True)}, width)
    assert all(len(line) <= width for line in found)
    text = "\n".join(found)
    assert all(fact in text for fact in ("partial", "71/72", "~1.4x", "12.1 s"))
    assert text.count("  kern") == 2, "the arguments, cut to the width"
    if width >= 80:
        assert found[0].split()[:5] == ["folder", "state", "problems", "speed-up", "time"]
        below = width < 120
        assert len(found) == (5 if below else 3), "with arguments below, where a column of them is narrow"
        assert all(line.startswith("  kernel=") for line in found[2::2]) or not below


def test_a_run_without_arguments_has_one_line() -> None:
    run = _run(command="gemmpipe compare")
    assert len(lines({FOLDER: run}, 80)) == 2


def test_the_mean_speedup_is_over_all_regimes(tmp_path: Path) -> None:
    def described(*regimes: dict[str, object]) -> tuple[float | None, bool]:
        figures = {"regimes": regimes, "shared": sum(bool(each["shared"]) for each in regimes)}
        manifest = {"exit_code": 0, "pipeline": "tune", "figures": figures}
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        found = describe_run(tmp_path)
        return found.speedup, found.approximate

    regime = {"stay": 0, "shared": 0, "speedup": {"mean": 2.0, "least": 1.0, "most": 3.0, "count": 3}}
    other = {**regime, "speedup": {"mean": 16.0, "least": 1.0, "most": 3.0, "count": 1}}
    assert described(regime, other) == (pytest.approx((2.0**3 * 16) ** 0.25), False)
    assert described({**regime, "speedup": None, "stay": 2, "shared": 2}) == (1.0, True)
    assert described({**regime, "speedup": None}) == (None, False)
    assert described({**regime, "speedup": {"mean": "x", "count": -1}}) == (None, False)
