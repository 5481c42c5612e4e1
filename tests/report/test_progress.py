"""The estimate of a run's end on recorded events, and the texts of progress."""

import json
import lzma
from dataclasses import replace
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
        if left_s is None and not checked:  # one job alone has ended
            assert progress.left_text(now).startswith("at most"), now
            continue
        assert left_s is not None, now
        assert now + left_s - begin == pytest.approx(end - begin, rel=0.3), now - begin
        checked += 1
    assert checked > 15


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_the_bar_never_goes_back_and_ends_full(path: Path) -> None:
    rows = [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    progress, before = RunProgress(rows[0]["t"]), 0.0
    for row in rows:
        progress.take(Event(**{name: value for name, value in row.items() if name != "t"}), row["t"])
        assert progress.of_run is None or before <= progress.of_run <= 1
        before = progress.of_run or 0.0
    assert before == pytest.approx(1, abs=0.01)


def test_the_bar_goes_on_in_a_second_pass_which_its_title_names() -> None:
    progress, shares = RunProgress(0.0), []
    for number, began in ((1, 0.0), (2, 40.0)):
        for done, stage in ((2, "screen"), (3, "bench")):
            progress.take(Event(kind="step", text=stage, done=done, total=6, number=number, rest_s=5.0), began)
            progress.take(Event(kind="stage", text=stage, total=4), began)
            for step in range(5):
                progress.take(Event(kind="progress", done=step, total=4), began + 5 * step)
                shares.append(progress.of_run)
            began += 20
        assert progress.title == ("3 of 6: bench" if number == 1 else "3 of 6: bench, pass 2")
    assert shares == sorted(shares)
    assert 0.7 < shares[9] < shares[-1] <= 1


def test_the_bar_of_a_budget_is_its_time() -> None:
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="screen", done=2, total=6, rest_s=20.0), 0.0)
    progress.take(Event(kind="stage", text="screen", unit="trials"), 0.0)
    assert progress.of_run is None
    progress.take(Event(kind="progress", done=90, total=100, share=0.9, left_s=50.0), 10.0)
    assert progress.of_run == pytest.approx(10 / 60)
    waited = RunProgress(0.0)
    waited.take(Event(kind="stage", text="screen", unit="trials"), 80.0)  # for another run on this CPU
    waited.take(Event(kind="progress", done=90, total=100, share=0.9, left_s=50.0), 90.0)
    assert waited.of_run == pytest.approx(10 / 60), "of the budget"
    progress.take(Event(kind="step", text="bench", done=3, total=6), 30.0)
    assert progress.of_run == pytest.approx(10 / 60)
    assert progress.line(30.0).startswith("3 of 6: bench, 17 %")


def test_the_recorded_runs_are_there() -> None:
    assert len(RECORDED) >= 6


def test_a_budget_ends_the_run_whatever_the_work_lets_expect() -> None:
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="screen", done=2, total=6, rest_s=20.0), 0.0)
    progress.take(Event(kind="stage", text="screen", unit="trials"), 0.0)
    progress.take(Event(kind="progress", done=1, total=100, share=0.1, left_s=50.0), 10.0)
    assert progress.left_s(12.0) == 48.0
    assert progress.left_s(99.0) is None, "what has begun before its end is finished"
    assert progress.left_text(58.0) == "about 2 s left"
    assert progress.left_text(99.0) == "budget spent, finishing"
    assert "17 % of the budget" in progress.line(10.0), "not of the work, of which most may be left"
    progress.take(Event(kind="progress", done=50, total=100, share=0.5), 20.0)
    assert progress.left_s(20.0) == pytest.approx(12.5 + 20), "as the work lets expect again: 40 % in 10 s"


def test_a_budget_ends_the_run_if_its_work_does_not_end_before() -> None:
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="screen", done=2, total=6, rest_s=20.0), 0.0)
    progress.take(Event(kind="stage", text="screen", unit="trials"), 0.0)
    progress.take(Event(kind="progress", text="listing configurations", most_s=60.0), 1.0)
    assert progress.left_s(3.0) is None
    assert progress.left_text(3.0) == "at most 60 s left"
    progress.take(Event(kind="progress", done=1, total=100, share=0.1, stage_s=90.0, most_s=50.0), 10.0)
    assert progress.left_s(12.0) == pytest.approx(48)
    assert "17 % of the budget" in progress.line(10.0)
    progress.take(Event(kind="progress", done=50, total=100, share=0.5, stage_s=15.0, most_s=40.0), 20.0)
    assert progress.left_s(20.0) == pytest.approx(15 + 20)
    assert "of the budget" not in progress.line(20.0)
    progress.take(Event(kind="progress", done=51, total=100, share=0.51, stage_s=30.0, most_s=2.0), 58.0)
    assert progress.left_text(61.0) == "budget spent, finishing"


def test_a_stage_that_is_not_sure_states_the_least_and_the_most() -> None:
    """The screening of few products on a GPU."""
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="screen", done=2, total=6, rest_s=5.0), 0.0)
    progress.take(Event(kind="stage", text="screen", unit="trials"), 0.0)
    progress.take(Event(kind="progress", share=0.5, stage_s=20.0, stage_factor=2.0), 20.0)
    assert progress.left_s(20.0) == pytest.approx(25)
    assert progress.range_s(20.0) == pytest.approx((10 + 5, 40 + 5))
    assert progress.left_text(20.0) == "15 to 45 s left"
    progress.take(Event(kind="progress", share=0.6, stage_s=20.0, stage_factor=1.3), 22.0)
    assert progress.range_s(22.0) is None, "one number is near enough to both ends"
    assert progress.left_text(22.0) == "about 25 s left"


def test_a_budget_that_may_end_the_run_states_both_ends() -> None:
    """On a CPU, while another pass may begin after this one."""
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="bench", done=3, total=6), 0.0)
    progress.take(Event(kind="stage", text="bench", total=5), 0.0)
    event = Event(kind="progress", done=2, total=5, share=0.4, left_s=10.0, left_range_s=(7.0, 19.0), most_s=16.0)
    progress.take(event, 44.0)
    assert progress.left_s(46.0) == 8.0
    assert progress.range_s(46.0) == (5.0, 17.0), "they count down"
    assert progress.left_text(46.0) == "5 to 17 s left"
    progress.take(replace(event, left_range_s=(12.0, 19.0)), 46.0)
    assert progress.range_s(46.0) is None, "one number is near enough to both ends"
    progress.take(replace(event, left_range_s=None, left_s=16.0), 47.0)
    assert progress.range_s(47.0) is None
    assert progress.left_text(47.0) == "about 16 s left"


def test_the_time_left_counts_down_between_results() -> None:
    remaining = RemainingTime(0.0)
    remaining.take(0.0, 4.0)  # processes start
    assert remaining.left_s(4.0) is None
    remaining.take(0.05, 5.0)
    assert remaining.left_s(6.0) is None, "they take a part of the time of the first result"
    remaining.take(0.25, 13.0)
    assert remaining.left_s(13.0) == pytest.approx(30.0)
    assert remaining.left_s(18.0) == pytest.approx(25.0)
    assert remaining.left_s(38.0) == pytest.approx(25.0), "a result is late: what is left is slower than what is done"
    assert remaining.left_s(999.0) == pytest.approx(90.0), "at most three times as slow"
    remaining.take(0.5, 999.0, 7.0)
    assert remaining.left_s(1000.0) == pytest.approx(6.0), "as stated"
    remaining.take(1.0, 1000.0)
    assert remaining.left_s(1000.0) == 0.0


def test_an_expected_time_counts_like_a_half_of_the_work() -> None:
    remaining = RemainingTime(0.0, expected_s=40.0)
    assert remaining.left_s(10.0) == pytest.approx(30.0)
    remaining.take(0.1, 10.0)  # libraries load
    assert remaining.left_s(10.0) == pytest.approx(0.9 * 40)
    remaining.take(0.6, 50.0)
    assert remaining.left_s(58.0) == pytest.approx(0.4 * (20 + 40) - 8)
    assert remaining.left_s(80.0) == pytest.approx(0.15 * 24), "a result is late, but its time was expected"
    assert remaining.left_s(104.0) == pytest.approx(0.5 * 30)
    assert remaining.left_s(50.0) == pytest.approx(0.4 * (20 + 40)), "half of it at the expected pace, half at 80 s"


def test_a_long_product_at_the_end_is_not_about_one_second_left() -> None:
    """Four of five products remain, which take longer than the first."""
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="screen", done=2, total=6), 0.0)
    progress.take(Event(kind="stage", text="screen", unit="problems", total=5), 0.0)
    progress.take(Event(kind="progress", done=0, total=5), 1.0)
    progress.take(Event(kind="progress", done=1, total=5), 3.0)
    assert progress.left_text(4.0) == "about 11 s left"
    assert progress.left_text(20.0) == "about 17 s left"
    assert progress.of_run == pytest.approx(0.2)


def test_no_time_is_left_after_the_work_but_the_run_finishes() -> None:
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="bench", done=3, total=6), 0.0)
    progress.take(Event(kind="stage", text="bench", unit="problems", total=2), 0.0)
    progress.take(Event(kind="progress", done=1, total=2), 10.0)
    progress.take(Event(kind="progress", done=2, total=2), 20.0)
    assert progress.line(20.0) == "3 of 6: bench, 100 %, 2 of 2 problems, 20 s, finishing"
    progress.take(Event(kind="step", text="merge", done=6, total=6), 20.1)
    assert progress.line(20.2) == "6 of 6: merge, 100 %, 20 s, finishing"


def test_stages_that_follow_and_later_batches_count() -> None:
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="screen", done=2, total=6, rest_s=20.0, later=2.0), 0.0)
    progress.take(Event(kind="stage", text="screen", unit="trials"), 0.0)
    progress.take(Event(kind="progress", text="16x8x8", done=50, total=100, share=0.5), 30.0)
    assert progress.left_s(30.0) == pytest.approx(30 + 20 + 2 * (30 + 30 + 20))
    assert progress.line(30.0) == ("2 of 6: screen, 12 %, 50 of about 100 trials, 30 s, about 4 min left; 16x8x8")


def test_the_rest_of_a_step_of_several_stages_counts() -> None:
    """An engine's function: its screening, compiling, its finals."""
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="engine", done=4, total=6, rest_s=1.0, later=1.0), 0.0)
    progress.take(Event(kind="stage", text="screen", unit="trials", rest_s=40.0), 0.0)
    progress.take(Event(kind="rest", rest_s=60.0), 20.0)
    progress.take(Event(kind="progress", done=50, total=100, share=0.5), 30.0)
    assert progress.left_s(30.0) == pytest.approx(91 + 121)
    assert progress.of_run == pytest.approx(30 / 242)
    progress.take(Event(kind="progress", done=100, total=100, share=1.0), 60.0)
    assert progress.left_s(60.0) == pytest.approx(61 + 121)
    progress.take(Event(kind="stage", text="bench", unit="problems"), 60.0)
    assert progress.left_s(60.0) == pytest.approx(61 + 121), "a stage that begins ends no other one's expected time"
    progress.take(Event(kind="progress", done=40, total=80), 100.0)
    assert progress.left_s(100.0) == pytest.approx(40 + 1 + 141)
    progress.take(Event(kind="step", text="select", done=5, total=6), 141.0)
    progress.take(Event(kind="stage", text="select"), 141.0)
    progress.take(Event(kind="progress", done=1, total=1), 142.0)
    assert progress.left_s(142.0) == 0


def test_an_expected_end_that_is_over_says_nothing_of_the_work_that_is_left() -> None:
    """The finals of a comparison: expected for 16 s, and after 20 s a quarter is done."""
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="lineup", done=2, total=4, rest_s=16.0), 0.0)
    progress.take(Event(kind="stage", text="lineup", unit="problems"), 0.0)
    progress.take(Event(kind="progress", done=1, total=1), 1.0)
    progress.take(Event(kind="step", text="bench", done=3, total=4), 1.0)
    progress.take(Event(kind="stage", text="bench", unit="problems"), 1.0)
    progress.take(Event(kind="progress", done=0, total=56), 1.0)
    progress.take(Event(kind="progress", done=14, total=56), 21.0)
    assert progress.left_s(21.0) == pytest.approx(60)


def test_the_estimate_survives_the_change_of_a_stage() -> None:
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="screen", done=2, total=6, rest_s=20.0), 0.0)
    progress.take(Event(kind="stage", text="screen"), 0.0)
    progress.take(Event(kind="progress", done=10, total=10), 30.0)
    progress.take(Event(kind="step", text="bench", done=3, total=6), 30.0)
    assert progress.left_s(32.0) == pytest.approx(18.0)
    progress.take(Event(kind="stopping", text="interrupted"), 33.0)
    assert progress.left_s(33.0) is None


def test_the_first_stage_with_an_expected_time_is_known_before_its_results() -> None:
    """The first finals of `verify`; what a later stage states counts half, what was expected before the other half."""
    progress = RunProgress(0.0)
    progress.take(Event(kind="step", text="bench", done=3, total=5, rest_s=13.0, later=0.5), 0.0)
    progress.take(Event(kind="stage", text="bench", total=96, unit="problems", expected_s=12.0), 0.0)
    assert progress.left_s(1.0) == pytest.approx(1.5 * 25 - 1)
    progress.take(Event(kind="progress", done=0, total=96, share=0.0), 0.5)
    progress.take(Event(kind="progress", done=5, total=96, share=0.05), 2.0)
    assert progress.left_s(2.0) == pytest.approx(1.5 * 25 - 2, rel=0.15), "of its work, one result is done"
    progress.take(Event(kind="step", text="called", done=4, total=5, later=0.5), 12.0)
    before_s = progress.left_s(12.0)
    assert before_s is not None
    progress.take(Event(kind="stage", text="called", total=96, unit="problems", expected_s=90.0), 12.0)
    stated_s = 90 + 0.5 * (12 + 90)
    assert progress.left_s(12.0) == pytest.approx((before_s + stated_s) / 2, rel=0.1), "a part of each"
