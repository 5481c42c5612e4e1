"""The estimate of a run's end on recorded events, and the texts of progress."""

import json
import lzma
from pathlib import Path

import pytest

from gemmpipe.core.events import Event
from gemmpipe.report.progress import RemainingTime, RunProgress

RECORDED = sorted((Path(__file__).parents[1] / "data" / "progress").glob("*.jsonl.xz"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_from_a_quarter_of_a_run_on_its_end_is_known_within_30_percent(path: Path) -> None:
    """Runs on a modelled H200, and on two cores that other processes used too, where workers start for seconds."""
    rows = [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    times = [row.pop("t") for row in rows]
    begin, end = times[0], times[-1]
    progress, checked, has_results = RunProgress(begin), 0, False
    for row, now in zip(rows, times, strict=True):
        progress.take(Event(**row), now)
        has_results = has_results or bool(row.get("share"))
        if now < begin + (end - begin) / 4 or now == end or not has_results:
            continue
        left_s = progress.left_s(now)
        assert left_s is not None, now
        assert now + left_s - begin == pytest.approx(end - begin, rel=0.3), now - begin
        checked += 1
    assert checked > 15


def test_the_recorded_runs_are_there() -> None:
    assert len(RECORDED) >= 6


def test_a_budget_ends_the_run_whatever_the_work_lets_expect() -> None:
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="screen", done=2, total=6, rest_s=20.0), 0.0)
    progress.take(Event(kind="stage", text="screen", unit="trials"), 0.0)
    progress.take(Event(kind="progress", done=1, total=100, share=0.1, left_s=50.0), 10.0)
    assert progress.left_s(12.0) == 48.0
    assert progress.left_s(99.0) == 0.0
    progress.take(Event(kind="progress", done=50, total=100, share=0.5), 20.0)
    assert progress.left_s(20.0) == pytest.approx(20 + 20), "as the work lets expect again"


def test_the_time_left_counts_down_between_results() -> None:
    remaining = RemainingTime(0.0)
    remaining.take(0.0, 5.0)  # processes start
    assert remaining.left_s(6.0) is None
    remaining.take(0.25, 15.0)
    assert remaining.left_s(15.0) == pytest.approx(30.0)
    assert remaining.left_s(20.0) == pytest.approx(25.0)
    assert remaining.left_s(99.0) == 0.0


def test_stages_that_follow_and_later_batches_count() -> None:
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="screen", done=2, total=6, rest_s=20.0, later=2.0), 0.0)
    progress.take(Event(kind="stage", text="screen", unit="trials"), 0.0)
    progress.take(Event(kind="progress", text="16x8x8", done=50, total=100, share=0.5), 30.0)
    assert progress.left_s(30.0) == pytest.approx(30 + 20 + 2 * (30 + 30 + 20))
    assert progress.line(30.0) == ("2 of 6: screen, 50 %, 50 of about 100 trials, 30 s, about 4 min left; 16x8x8")


def test_the_estimate_survives_the_change_of_a_stage() -> None:
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="screen", done=2, total=6, rest_s=20.0), 0.0)
    progress.take(Event(kind="stage", text="screen"), 0.0)
    progress.take(Event(kind="progress", done=10, total=10), 30.0)
    progress.take(Event(kind="step", text="bench", done=3, total=6), 30.0)
    assert progress.left_s(32.0) == pytest.approx(18.0)
    progress.take(Event(kind="stopping", text="interrupted"), 33.0)
    assert progress.left_s(33.0) is None
