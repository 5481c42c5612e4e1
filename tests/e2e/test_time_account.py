"""Where a run's time went: what every resource did and when it waited is measured, and adds up to the wall time."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemmpipe.cli.main import main
from gemmpipe.core.events import TimeAccount
from gemmpipe.executors import Usage
from gemmpipe.pipeline.summary import usage_line

pytestmark = pytest.mark.usefixtures("own_locks")


def test_a_purpose_within_another_is_taken_off_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("gemmpipe.core.events.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    watch = TimeAccount()
    with watch.timed("outer"):
        now_s[0] += 2
        with watch.timed("inner"):
            now_s[0] += 5
        with contextlib.suppress(ValueError), watch.timed("inner"):
            now_s[0] += 16
            raise ValueError
        now_s[0] += 3
    now_s[0] += 100
    with watch.timed("outer"):
        now_s[0] += 1
    assert watch.spent_s == {"outer": 6, "inner": 21}


def _resources(folder: Path) -> dict[str, dict[str, object]]:
    path = max(folder.glob("outputs/runs/*/*/manifest.json"), key=lambda p: p.stat().st_mtime_ns)
    return {str(r["name"]): r for r in json.loads(path.read_text())["resources"]}


def _add_up(resources: dict[str, dict[str, object]]) -> None:
    """Busy and idle are the wall time of every resource within a tenth; what no stage names counts as `between`."""
    assert {"driver", "cpu"} <= set(resources)
    for name, resource in resources.items():
        wall_s, idle_s = float(str(resource["wall_s"])), float(str(resource["idle_s"]))
        busy: dict[str, float] = resource["busy_s"]  # type: ignore[assignment]
        assert all(seconds >= 0 for seconds in busy.values()), name
        assert abs(wall_s - idle_s - sum(busy.values())) <= 0.1 * wall_s + 0.005, (name, resource)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "purposes"),
    [
        (("space.PACE_MS=[0,20]",), {"start", "load", "first_launch", "screening", "checks", "finals", "operands"}),
        (("space.PACE_MS=[0]", "space.KIND=[right,kill]"), {"start", "lost", "finals"}),
    ],
    ids=["well", "with a worker that dies"],
)
def test_busy_and_idle_are_the_wall_time(
    folder: Path, faulty_arguments: tuple[str, ...], arguments: tuple[str, ...], purposes: set[str]
) -> None:
    assert main([*faulty_arguments, *arguments]) == 0
    resources = _resources(folder)
    _add_up(resources)
    assert purposes <= set(resources["cpu"]["busy_s"])  # type: ignore[call-overload]
    assert {"start", "screen", "search", "journal", "bench", "select", "merge", "write"} <= set(
        resources["driver"]["busy_s"]  # type: ignore[call-overload]
    )
    assert float(str(resources["driver"]["idle_s"])) > 0, "it waits for the worker"


@pytest.mark.e2e
def test_a_comparison_accounts_for_its_time_too(folder: Path, faulty_arguments: tuple[str, ...]) -> None:
    assert main(["compare", *faulty_arguments, "space.PACE_MS=[5]"]) == 0
    resources = _resources(folder)
    _add_up(resources)
    assert {"start", "lineup", "bench", "compare", "write"} <= set(resources["driver"]["busy_s"])  # type: ignore[call-overload]
    assert {"start", "operands", "checks", "finals"} <= set(resources["cpu"]["busy_s"])  # type: ignore[call-overload]


def test_what_a_run_says_of_a_resource_leaves_out_zeros() -> None:
    usage = Usage(name="cpu", wall_s=3.0, busy_s={"load": 0.01, "finals": 0.5, "checks": 1.25}, idle=[(0.0, 1.24)])
    assert usage_line(usage) == "cpu: checks 1.2 s, finals 0.5 s; idle 1.2 s of 3.0 s"
    assert usage_line(Usage(name="cpu", wall_s=1.0, busy_s={}, idle=[(0.0, 1.0)])).startswith("cpu: nothing to do;")
