"""The order and the time of a run on a CPU with a budget."""

import pytest

from gemmpipe.core.data import Problem
from gemmpipe.family import load_family
from gemmpipe.stages import cpu_budget
from gemmpipe.stages.cpu_budget import CpuBudget, RunEnd, left_line, trials_at_once, tuning_order

pytestmark = pytest.mark.unit


def _problem(m: int, n: int, calls: float = 1.0) -> Problem:
    key = {"M": m, "N": n, "K": 128, "bias": False, "dtype": "bfloat16", "outdtype": "bfloat16"}
    key |= {"scaleAB": False, "bpreshuffle": False}
    return load_family("a16w16").problem(tuple(key.items()), weight=calls)


def test_few_rows_come_first_then_the_product_that_takes_most() -> None:
    small, often, large = _problem(1, 64), _problem(1, 64 * 2, calls=80.0), _problem(1, 4096)
    later = _problem(8, 64 * 3)
    family = load_family("a16w16")
    assert tuning_order([later, small, large, often], family) == [often, large, small, later]


def test_a_pass_keeps_time_for_the_finals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(cpu_budget.time, "monotonic", lambda: now[0])
    budget = CpuBudget(limit_s=60.0, began=now[0])
    budget.begin_screening()
    assert budget.screening_ends_at == 124.0
    now[0] = 130.0
    assert budget.remaining_s == 30.0
    budget.begin_screening()
    assert budget.screening_ends_at == 142.0, "a share of what is left"
    assert budget.allows_pass
    now[0] = 152.0
    assert not budget.allows_pass
    now[0] = 170.0
    budget.begin_screening()
    assert budget.screening_ends_at == 170.0


def test_the_start_of_workers_is_not_the_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it takes half a minute, and a resumed run would have time for one product."""
    now, ready = [100.0], list[float]()
    monkeypatch.setattr(cpu_budget.time, "monotonic", lambda: now[0])
    budget = CpuBudget(limit_s=60.0, began=now[0], ready_at=lambda: ready[0] if ready else None)
    budget.begin_screening()
    now[0] = 130.0
    assert budget.remaining_s == 60.0
    ready.append(128.0)
    assert (budget.remaining_s, budget.screening_ends_at) == (58.0, 152.0)
    now[0] = 129.0
    assert not budget.ends_without_result
    ready[:] = [140.0]
    assert budget.ends_at == 188.0, "another worker later does not move it"


def test_a_run_without_a_result_in_much_of_its_time_takes_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(cpu_budget.time, "monotonic", lambda: now[0])
    budget = CpuBudget(limit_s=60.0, began=now[0])
    budget.begin_screening()
    assert budget.screening_ends_at == 124.0
    now[0] = 105.0  # workers start
    assert not budget.ends_without_result
    now[0] = 125.0
    assert budget.ends_without_result


def test_a_pass_that_may_be_the_last_one_states_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """6.5 s were stated of 16.7: the finals were over in time for another pass."""
    now = [100.0]
    monkeypatch.setattr(cpu_budget.time, "monotonic", lambda: now[0])
    budget = CpuBudget(limit_s=60.0, began=now[0])
    first = budget.run_end(10.0, 1.5)
    assert first.range_s == pytest.approx((51.0, 63.0)), "no pass begins after 51 s; what has begun ends late"
    assert 51 < first.left_s < 60
    assert budget.run_end(10.0, 1.5, later_s=20.0) == RunEnd(left_s=30.0), "the problems that are left end it"
    now[0] = 144.0
    early, late = budget.run_end(6.0, 1.5), budget.run_end(8.0, 1.5)
    assert early.range_s == late.range_s == pytest.approx((7.0, 19.0)), "an end of this pass, or of the budget"
    assert 7 < late.left_s < early.left_s < budget.run_end(1.0, 1.5).left_s < 16
    last = budget.run_end(12.0, 1.5)
    assert last.left_s == pytest.approx(12.0)
    assert last.range_s == pytest.approx((8.0, 18.0)), "the last pass for sure: its own end"
    now[0] = 150.0
    assert budget.run_end(0.5, 1.5).range_s == pytest.approx((4.6, 13.0)), "a pass screens for 0.4 of the time"
    now[0] = 156.0
    assert budget.run_end(2.0, 1.5).left_s == pytest.approx(2.0), "no time for another one"
    now[0] = 170.0
    assert budget.end_s == 0.0
    assert budget.run_end(3.0, 1.5).left_s == pytest.approx(3.0), "what has begun is finished"


def test_the_share_of_a_screening_is_known_also_after_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(cpu_budget.time, "monotonic", lambda: now[0])
    budget = CpuBudget(limit_s=60.0, began=now[0])
    budget.begin_screening()
    assert budget.screened_share(6.0) == 0.75
    assert budget.screened_share(30.0) == 0.1
    now[0] = 170.0
    budget.begin_screening()
    assert budget.screened_share(0.0) == 1.0


def test_finals_so_far_correct_the_time_of_those_that_follow() -> None:
    budget = CpuBudget(limit_s=60.0)
    assert budget.finals_pace == 1.0
    budget.take_finals(expected_s=1.0, spent_s=2.0)
    assert 1.0 < budget.finals_pace < 1.5, "one result says little"
    budget.take_finals(expected_s=100.0, spent_s=200.0)
    assert budget.finals_pace == pytest.approx(2.0, rel=0.05)


def test_a_long_search_ends_in_time_for_its_finals_and_a_short_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(cpu_budget.time, "monotonic", lambda: now[0])
    budget = CpuBudget(limit_s=60.0, began=now[0])
    budget.begin_screening()
    assert budget.screening_ends_at == 124.0
    now[0] = 130.0
    assert not budget.cuts_search(2.0, 10), "half of the time for finals may be used"
    now[0] = 141.0
    assert budget.cuts_search(2.0, 10)
    assert not budget.cuts_search(0.01, 10), "a tenth of a second"
    now[0] = 125.0
    assert budget.cuts_search(8.0, 2), "its finals take 40 s"
    assert not budget.has_time_for(8.0)
    assert budget.has_time_for(3.0)


def test_a_worker_gets_a_second_of_work_at_once() -> None:
    assert trials_at_once(None) == 1
    assert trials_at_once(0.1) == 10
    assert trials_at_once(3.0) == 1


def test_problems_with_a_choice_come_last() -> None:
    small, large = _problem(1, 64), _problem(8, 64)
    assert tuning_order([large, small], load_family("a16w16"), tuned={small.id: ()}) == [large, small]


def test_the_line_of_a_check_of_a_table() -> None:
    line = left_line(3, [_problem(16, 64)], 60.0, tunes=False)
    assert line.startswith("2 of 3 problems timed in cpu_budget_s=60")


def test_the_run_goes_on_to_its_end_only_with_problems_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_budget.time, "monotonic", lambda: 130.0)
    budget = CpuBudget(limit_s=60.0, began=100.0)
    assert not budget.ends_run
    budget.left.add("a problem")
    assert budget.ends_run
    assert not CpuBudget(limit_s=60.0, began=75.0, left={"a problem"}).ends_run


def test_the_line_names_what_is_left() -> None:
    left = [_problem(16, 64), _problem(64, 64)]
    line = left_line(3, left, 60.0)
    assert line.startswith("1 of 3 problems tuned in cpu_budget_s=60")
    assert "left: 2 with M 16 to 64" in line
    assert "(null: no limit)" in line
    assert "resume" not in line, "the command has a line of its own"
