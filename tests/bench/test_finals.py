"""Finals: incorrect results, elimination, order of rounds, and launches per sample."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import pytest
from failing_jobs import Cells, PacedClock, by_kind, candidate, finals

from gemmpipe.bench.finals import PAUSE_RATIO, SUSTAINED_ROUNDS, FinalistRun
from gemmpipe.bench.jobs import RUNNING_SEVERAL, WorkerContext
from gemmpipe.bench.setup import ProblemSetup
from gemmpipe.bench.timer import CpuClock, TimedCall, TimedReplay
from gemmpipe.core.data import Status
from gemmpipe.core.nvml import ForeignProcesses


@pytest.mark.parametrize("kind", ["spoil_nan", "untouched", "permute", "spoil_row", "wrong_at_8"])
def test_finals_reject_incorrect_results(context: WorkerContext, kind: str) -> None:
    found = by_kind(finals(candidate("right"), candidate(kind)).run(context))
    assert found["right"].status is Status.OK
    assert found["right"].err_ratio == 0
    assert found[kind].status is Status.INCORRECT
    assert found[kind].err_ratio == 1
    assert found[kind].error == "error ratio 1.0000, must be below 0.05"
    assert found[kind].samples_us == ()


def test_finals_eliminate_slower_finalists_except_baseline_and_incumbent(context: WorkerContext) -> None:
    fast, slow = candidate("right"), candidate("right", 2)
    library, incumbent = candidate("right", 3), candidate("right", 4)
    job = finals(
        fast, slow, library, incumbent, library=frozenset({library.id}), always_timed=frozenset({incumbent.id})
    )
    found = {t.candidate: t for t in job.run(context)}
    assert found[slow].status is Status.PRUNED
    assert len(found[slow].samples_us) == 1
    for staying in (fast, library, incumbent):
        assert found[staying].status is Status.OK
        assert len(found[staying].samples_us) >= 3


class ScriptedProcesses(ForeignProcesses):
    """Returns given results, since there is no GPU."""

    def __init__(self, *detections: bool) -> None:
        self.detections = list(detections)

    def detect(self) -> bool:
        return self.detections.pop(0)


@pytest.mark.parametrize("lacks", [False, True])
def test_trials_say_that_no_dependent_launch_could_be_made(context: WorkerContext, lacks: bool) -> None:
    context.clock.no_dependent_launch = lacks
    trials = finals(candidate("right"), candidate("slow")).run(context)
    assert {t.no_dependent_launch for t in trials if t.status is Status.OK} == {lacks}


@pytest.mark.parametrize(
    ("detections", "shared"),
    [((True, False), False), ((False, True, False), False), ((False, True, True), True)],
    ids=["before only", "once", "twice"],
)
def test_finals_with_another_process_are_repeated_and_then_marked(
    context: WorkerContext, detections: tuple[bool, ...], shared: bool
) -> None:
    processes = ScriptedProcesses(*detections)
    trials = finals(candidate("right"), candidate("slow")).run(replace(context, foreign_processes=processes))
    assert processes.detections == []
    assert {t.shared for t in trials} == {shared}
    found = by_kind(trials)
    assert found["right"].status is Status.OK
    assert len(found["right"].samples_us) == 5


@pytest.mark.parametrize(
    ("sustained_ms", "limited", "overlaps", "sustained"),
    [(100, True, True, True), (100, False, True, False), (100, True, False, False), (0, True, True, False)],
    ids=["limited", "waits for memory", "cpu", "off"],
)
def test_products_at_the_power_limit_are_timed_at_both_clocks(
    paced: WorkerContext,
    cells: Cells,
    monkeypatch: pytest.MonkeyPatch,
    sustained_ms: float,
    limited: bool,
    overlaps: bool,
    sustained: bool,
) -> None:
    """The rounds at full clocks, then as many as without these."""
    monkeypatch.setattr("gemmpipe.bench.timer.reaches_power_limit", lambda family, spec: limited)
    monkeypatch.setattr(paced.clock, "overlaps", overlaps)
    three = [candidate("right", pace_ms=pace) for pace in (25, 26, 40)]
    job = finals(*three, always_timed=frozenset(c.id for c in three))
    trials = replace(job, timer=replace(job.timer, sustained_ms=sustained_ms)).run(paced)
    assert [len(t.samples_us) for t in trials] == [5, 5, 5], "others are no samples"
    run = [position for position in cells.positions[cells.positions.index(RUNNING_SEVERAL) :] if position >= 0]
    assert sorted(run) == [0] * 5 + [1] * 5 + [2] * 5, "none is in flight alone while others run untimed"
    assert [t.full_clocks_us for t in trials] == ([25_000, 26_000, 40_000] if sustained else [None] * 3)
    assert [t.launches for t in trials] == [10 if sustained else 5] * 3


class _LimitedClock(PacedClock):
    """Without a pause since 90 ms of work, launches of 10 ms take 1.5 times as long, all others 1.2 times."""

    def __init__(self) -> None:
        self.busy_us = 0.0
        self.pauses_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.busy_us = 0.0 if seconds else self.busy_us

    def replay(self, launches: Sequence[TimedCall]) -> TimedReplay:
        replay = super().replay(launches)

        def once() -> float:
            time_us = replay()
            time_us *= 1.0 if self.busy_us < 90_000 else 1.5 if time_us == 10_000 else 1.2
            self.busy_us += time_us * len(launches)
            return time_us

        return TimedReplay(once)


def test_a_sample_is_the_geometric_mean_of_both_clocks(paced: WorkerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest at full clocks (10, 15 us) is behind the second (11, 13.2), and that is so in each round."""
    clock = _LimitedClock()
    monkeypatch.setattr("gemmpipe.bench.timer.reaches_power_limit", lambda family, spec: True)
    monkeypatch.setattr("gemmpipe.bench.finals.time.sleep", clock.sleep)
    pair = [candidate("right", pace_ms=pace) for pace in (10, 11)]
    job = finals(*pair, always_timed=frozenset(c.id for c in pair))
    trials = replace(job, timer=replace(job.timer, sustained_ms=100)).run(replace(paced, clock=clock))
    for trial, full_us, sustained_us in zip(trials, (10_000, 11_000), (15_000, 13_200), strict=True):
        assert trial.full_clocks_us == full_us
        assert trial.samples_us == pytest.approx([(full_us * sustained_us) ** 0.5] * 5)
    rounds = [trial.launches // 2 for trial in trials]  # half of the launches at either clock
    paused = [pause for pause in clock.pauses_s if pause]
    assert paused == pytest.approx(sorted(paused), rel=0.2)
    assert sum(paused) == pytest.approx(PAUSE_RATIO * (rounds[0] * 0.010 + rounds[1] * 0.011))


def _scripted(*layouts: Sequence[float], launches: int = 2) -> FinalistRun:
    """A finalist whose replays take these times, one after the other, in each layout."""
    replays = tuple(TimedReplay(iter(times).__next__) for times in layouts)
    run = FinalistRun(
        candidate=candidate("right"), position=0, err_ratio=0, first_us=(1.0,) * len(layouts), binds=(),
        replays=replays, per_sample=launches,
    )  # fmt: skip
    run.begin(first=False)
    return run


def test_samples_at_both_clocks_are_paired_by_round_and_layout() -> None:
    """The second layout is the slower one by the means, though the first is at full clocks."""
    run = _scripted([100, 130, 121, 100, 144], [90, 110, 160, 144, 200])
    assert [run.run() for _ in range(2)] == [2 * (100 + 90), 2 * (130 + 110)]
    run.begin_sustained(lambda: None)
    assert [run.run() for _ in range(3)] == [2 * (121 + 160), 2 * (100 + 144), 2 * (144 + 200)]
    assert run.samples == pytest.approx([(90 * 160) ** 0.5, (110 * 144) ** 0.5, (90 * 200) ** 0.5])
    assert run.full_clocks_us == 100
    assert run.launches == 2 * 2 * 5
    assert run.load is not None
    run.begin(first=False)
    assert (run.full_clocks_us, run.launches, run.load) == (None, 0, None), "a repeated race begins at full clocks"


def test_the_fastest_finalists_run_after_each_replay_at_sustained_clocks(
    paced: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two near ones after each replay of theirs, three after one of the slow finalist, in turn."""
    clock = _LoadedClock()
    monkeypatch.setattr("gemmpipe.bench.timer.reaches_power_limit", lambda family, spec: True)
    three = [candidate("right", pace_ms=pace) for pace in (25, 26, 40)]
    job = finals(*three, always_timed=frozenset(c.id for c in three))
    trials = replace(job, timer=replace(job.timer, sustained_ms=100)).run(replace(paced, clock=clock))
    first = clock.ran.index("load 25000")  # at full clocks nothing runs between the replays
    reached = [each for each in clock.ran[first - 1 :] if not each.startswith("load")][:4]
    assert reached == ["25000", "26000"] * 2, "100 ms of the two that are near before the rounds"
    assert clock.waited == len(clock.ran), "no load runs on after the race"
    loads: dict[str, set[int]] = {}
    runs = [(key, len(list(group))) for key, group in groupby(clock.ran[first - 1 :], key=lambda each: each[:4])]
    for (timed, times), (load, count) in zip(runs[::2], runs[1::2], strict=True):
        assert (times, load) == (1, "load")
        loads.setdefault(timed, set()).add(count)
    assert loads == {"2500": {1}, "2600": {1}, "4000": {3}}
    in_turn = [each for each in clock.ran if each.startswith("load")]
    assert in_turn == (["load 25000", "load 26000"] * len(in_turn))[: len(in_turn)]
    assert [trial.launches for trial in trials] == [10] * 3, "loads are no samples"


def test_a_race_at_both_clocks_of_finalists_in_two_layouts_loads_with_all_of_them(
    paced: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _LoadedClock()
    monkeypatch.setattr("gemmpipe.bench.timer.reaches_power_limit", lambda family, spec: True)
    monkeypatch.setattr(ProblemSetup, "timed_scale_orders", lambda setup, candidate: ("row", "row"))
    one = candidate("right", pace_ms=30)
    job = finals(one, always_timed=frozenset({one.id}))
    [trial] = replace(job, timer=replace(job.timer, sustained_ms=100)).run(replace(paced, clock=clock))
    assert trial.status is Status.OK
    loads = [number for number, each in clock.order if each.startswith("load")]
    assert len(set(loads)) == 2, "the replay of either layout"
    assert abs(loads.count(loads[0]) - loads.count(loads[1])) <= 1


@pytest.mark.parametrize("kinds", [["spoil_nan"], []], ids=["incorrect", "none"])
def test_a_race_at_both_clocks_without_finalists(
    paced: WorkerContext, monkeypatch: pytest.MonkeyPatch, kinds: list[str]
) -> None:
    monkeypatch.setattr("gemmpipe.bench.timer.reaches_power_limit", lambda family, spec: True)
    job = finals(*map(candidate, kinds))
    trials = replace(job, timer=replace(job.timer, sustained_ms=100)).run(paced)
    assert [trial.status for trial in trials] == [Status.INCORRECT] * len(kinds)


@pytest.mark.parametrize(("limited", "rounds"), [(True, SUSTAINED_ROUNDS), (False, 30)])
def test_rounds_at_sustained_clocks_are_fewer(
    paced: WorkerContext, monkeypatch: pytest.MonkeyPatch, limited: bool, rounds: int
) -> None:
    monkeypatch.setattr("gemmpipe.bench.timer.reaches_power_limit", lambda family, spec: limited)
    one = candidate("right", pace_ms=1)
    job = finals(one, always_timed=frozenset({one.id}))
    timer = replace(job.timer, sustained_ms=100, rounds=30, budget_ms=1e4)
    [trial] = replace(job, timer=timer).run(paced)
    assert len(trial.samples_us) == rounds


class _LoadedClock(PacedClock):
    """Notes timed and untimed replays, by their microseconds."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.order: list[tuple[int, str]] = []
        """(number of the replay in the order of capture, what it is)."""
        self.made = self.waited = 0

    def synchronize(self) -> None:
        self.waited = len(self.ran)

    def replay(self, launches: Sequence[TimedCall]) -> TimedReplay:
        self.made += 1
        return _NotedReplay(super().replay(launches), self, self.made)


class _NotedReplay(TimedReplay):
    def __init__(self, replay: TimedReplay, clock: _LoadedClock, number: int) -> None:
        self._replay, self._clock, self._number = replay, clock, number

    def _note(self, text: str) -> None:
        self._clock.ran.append(text)
        self._clock.order.append((self._number, text))

    def __call__(self, load: TimedCall | None = None) -> float:
        time_us = self._replay()
        self._note(f"{time_us:.0f}")
        if load is not None:
            load()
        return time_us

    def queue(self) -> None:
        self._note(f"load {self._replay():.0f}")


def test_the_time_at_full_clocks_is_rounded_as_in_the_journal() -> None:
    run = _scripted([10.123456, 10.5], launches=1)
    run.run()
    run.begin_sustained()
    run.run()
    assert run.full_clocks_us == 10.1235


def test_a_race_at_both_clocks_that_is_repeated_begins_at_full_clocks(
    paced: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _LimitedClock()
    monkeypatch.setattr("gemmpipe.bench.timer.reaches_power_limit", lambda family, spec: True)
    monkeypatch.setattr("gemmpipe.bench.finals.time.sleep", clock.sleep)
    pair = [candidate("right", pace_ms=pace) for pace in (10, 11)]
    job = finals(*pair, always_timed=frozenset(c.id for c in pair))
    processes = ScriptedProcesses(False, True, False)
    context = replace(paced, clock=clock, foreign_processes=processes)
    trials = replace(job, timer=replace(job.timer, sustained_ms=100)).run(context)
    assert [trial.full_clocks_us for trial in trials] == [10_000, 11_000]
    for trial, us in zip(trials, ((10_000 * 15_000) ** 0.5, (11_000 * 13_200) ** 0.5), strict=True):
        assert trial.samples_us[1:] == pytest.approx([us] * 4), "the first replay has no pause since the race before"


def test_much_slower_finalists_are_eliminated_at_full_clocks(
    paced: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmpipe.bench.timer.reaches_power_limit", lambda family, spec: True)
    fast, slow = candidate("right", pace_ms=1), candidate("right", pace_ms=1.2)
    job = finals(fast, slow)
    found = {t.candidate: t for t in replace(job, timer=replace(job.timer, sustained_ms=100)).run(paced)}
    assert (found[fast].status, len(found[fast].samples_us)) == (Status.OK, 5)
    assert (found[slow].status, found[slow].samples_us) == (Status.PRUNED, (1_200.0,))


def test_every_round_has_its_own_order(context: WorkerContext, cells: Cells) -> None:
    """In a fixed order a power-hungry kernel, which lowers the clocks, would always slow the same rival."""
    pair = [candidate("right", pace_ms=2), candidate("right", pace_ms=2.1)]
    trials = finals(*pair, always_timed=frozenset(c.id for c in pair)).run(context)
    assert [len(t.samples_us) for t in trials] == [5, 5]
    checked = cells.positions.index(RUNNING_SEVERAL)
    raced = [position for position in cells.positions[checked:] if position >= 0]
    assert sorted(raced) == [0] * 5 + [1] * 5
    assert len({tuple(raced[i : i + 2]) for i in range(0, 10, 2)}) == 2


def test_a_finalist_far_behind_is_checked_and_not_raced(paced: WorkerContext) -> None:
    quick, slow, wrong = candidate("right", 1), candidate("right", 8), candidate("untouched", 9)
    found = {t.candidate: t for t in finals(quick, slow, wrong).run(paced)}
    assert (found[quick].status, len(found[quick].samples_us)) == (Status.OK, 5)
    assert (found[slow].status, found[slow].launches) == (Status.PRUNED, 1)
    assert found[slow].err_ratio is not None and found[slow].err_ratio < 0.05
    assert found[slow].time_us == 8_000
    assert found[wrong].status is Status.INCORRECT
    for role in ("library", "always_timed"):
        found = {t.candidate: t for t in finals(quick, slow, **{role: frozenset({slow.id})}).run(paced)}
        assert (found[slow].status, len(found[slow].samples_us)) == (Status.OK, 5), "timed to the end"


class _LateHostClock(CpuClock):
    """Every other launch seems to take four times as long, as if the host fell behind; times vary."""

    def __init__(self) -> None:
        self.launches = 0

    def sequence(self, launches: Sequence[TimedCall], least_us: float = 0.0) -> list[float]:
        times = []
        for launch in launches:
            launch()
            self.launches += 1
            times.append((36.0 if self.launches % 2 else 9.0) + 0.4 * (self.launches % 5))
        return times


def test_samples_of_possible_winners_have_equally_many_launches(context: WorkerContext) -> None:
    """Starting a graph takes some microseconds: divided by different numbers of launches, it changes the order."""
    finalists = [candidate("right", pace_ms=pace) for pace in (0, 0.001, 0.002, 0.003)]
    trials = finals(*finalists).run(replace(context, clock=_LateHostClock()))
    assert {trial.status for trial in trials} <= {Status.OK, Status.PRUNED}
    assert len({trial.launches // len(trial.samples_us) for trial in trials}) == 1
