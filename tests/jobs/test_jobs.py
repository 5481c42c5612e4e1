"""What a worker does with a job: who is in the air, what a failure becomes, who is timed to the end."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gemmpipe.backends.aten import Torch
from gemmpipe.conditions import Neighbours
from gemmpipe.data import Candidate, Problem, Status, Trial
from gemmpipe.device import DeviceChoice
from gemmpipe.family import Launch, load_family
from gemmpipe.jobs import SETTING_UP, TOGETHER, Flight, Poisoned, ProbeJob, Tools
from gemmpipe.jobs.finals import FinalsJob
from gemmpipe.jobs.screening import ScreenJob
from gemmpipe.search import Request
from gemmpipe.timer import Call, CpuClock, Replay, Timer
from gemmpipe.workbench import OperandCache, Setup, Workbench
from gemmpipe.worker import Post, ready_tools

TIMER = Timer(warmup=1, iters=2, rounds=5, budget_ms=200)
PROBLEM = Problem(family="faulty", key=(("M", 8), ("N", 16), ("K", 32)))


class DeadClock(CpuClock):
    """A device that is lost from the first error on."""

    def synchronize(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")


class Cells(list[float]):
    """Remembers every position."""

    def __init__(self) -> None:
        super().__init__([0.0, 0.0])
        self.positions: list[float] = []

    def __setitem__(self, index: object, value: object) -> None:
        super().__setitem__(index, value)  # type: ignore[index, assignment]
        if index == 0:
            self.positions.append(value)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    folder = str(Path(__file__).parents[1] / "faulty")
    sys.path.insert(0, folder)
    family = load_family("faulty")
    yield Workbench(
        family, {"faulty": family.implementations[0]}, DeviceChoice(kind="cpu", index=None, shared=False).find()[0]
    )
    sys.path.remove(folder)


@pytest.fixture
def cells() -> Cells:
    return Cells()


@pytest.fixture
def tools(bench: Workbench, cells: Cells) -> Tools:
    bench.launched.clear()
    bench.once_us.clear()
    bench.library_us.clear()
    return Tools(bench=bench, clock=CpuClock(), flight=Flight(cells), neighbours=Neighbours(bench.device))


def _candidate(kind: str, pace_ms: float = 0) -> Candidate:
    return Candidate.of("faulty", {"KIND": kind, "PACE_MS": pace_ms})


def _screen(*kinds: str, launches: int = 2, timer: Timer = TIMER) -> ScreenJob:
    requests = tuple(Request(candidate=_candidate(kind), launches=launches) for kind in kinds)
    return ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=timer)


def _finals(
    *finalists: Candidate, library: frozenset[str] = frozenset(), kept: frozenset[str] = frozenset()
) -> FinalsJob:
    return FinalsJob(
        stage="bench",
        problem=PROBLEM,
        finalists=finalists,
        library=library,
        kept=kept,
        timer=TIMER,
        err_ratio=0.05,
    )


def _by_kind(trials: list[Trial]) -> dict[str, Trial]:
    assert len({t.candidate for t in trials}) == len(trials)
    return {str(t.candidate.knobs["KIND"]): t for t in trials}


def test_screening_gives_the_launches_asked_for(tools: Tools, cells: Cells) -> None:
    found = _by_kind(_screen("right", "raise_bind", "raise_launch", "untouched").run(tools))
    assert {kind: t.status for kind, t in found.items()} == {
        "right": Status.OK,
        "untouched": Status.OK,  # bench checks, screen does not
        "raise_bind": Status.LAUNCH_ERROR,
        "raise_launch": Status.LAUNCH_ERROR,
    }
    assert re.fullmatch(r"\S+/faulty\.py:\d+: RuntimeError: this kernel cannot", found["raise_launch"].error)
    assert found["raise_launch"].time_us is None
    assert found["untouched"].launches == 2
    assert cells.positions == [SETTING_UP, 0, 1, 2, 3, TOGETHER]


def test_one_alone_is_in_the_air_all_the_time(tools: Tools, cells: Cells) -> None:
    _screen("right").run(tools)
    assert cells.positions == [SETTING_UP, 0, 0]


def test_a_lost_device_ends_the_job_and_its_trials_stand(bench: Workbench, cells: Cells) -> None:
    dead = Tools(bench=bench, clock=DeadClock(), flight=Flight(cells), neighbours=Neighbours(bench.device))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        dead.clock.synchronize()
    assert not dead.alive()
    trials: list[Trial] = []
    with pytest.raises(Poisoned) as poisoned:
        _probe("raise_launch").attempt(dead, trials, 0, lambda _: dead.clock.synchronize())
    assert [t.status for t in poisoned.value.trials] == [Status.LAUNCH_ERROR]


def _probe(kind: str) -> ProbeJob:
    return ProbeJob(stage="screen", problem=PROBLEM, candidate=_candidate(kind))


def test_a_probe_says_only_what_fails(tools: Tools, cells: Cells) -> None:
    assert _probe("right").run(tools) == []
    assert cells.positions == [SETTING_UP, 0]
    assert [t.status for t in _probe("raise_odd").run(tools)] == [Status.LAUNCH_ERROR]


@pytest.mark.parametrize("kind", ["spoil_nan", "untouched", "permute", "spoil_row", "wrong_at_8"])
def test_finals_refuse_what_is_wrong(tools: Tools, kind: str) -> None:
    found = _by_kind(_finals(_candidate("right"), _candidate(kind)).run(tools))
    assert found["right"].status is Status.OK
    assert found["right"].err_ratio == 0
    assert found[kind].status is Status.WRONG
    assert found[kind].err_ratio == 1
    assert found[kind].error == "error ratio 1.0000, must be below 0.05"
    assert found[kind].samples_us == ()


def test_finals_stop_timing_who_is_outrun_but_for_baseline_and_incumbent(tools: Tools) -> None:
    fast, slow = _candidate("right"), _candidate("right", 2)
    library, incumbent = _candidate("right", 3), _candidate("right", 4)
    job = _finals(fast, slow, library, incumbent, library=frozenset({library.id}), kept=frozenset({incumbent.id}))
    found = {t.candidate: t for t in job.run(tools)}
    assert found[slow].status is Status.DROPPED
    assert len(found[slow].samples_us) == 1
    for candidate in (fast, library, incumbent):
        assert found[candidate].status is Status.OK
        assert len(found[candidate].samples_us) >= 3


def test_work_for_the_others(tools: Tools) -> None:
    right, wrong = _candidate("right"), _candidate("kill")
    job = _finals(right, wrong)
    assert job.without({wrong}).candidates == (right,)
    assert job.without({right, wrong}).run(tools) == []
    assert _screen("right", "kill").without({wrong}).candidates == (right,)


def test_operands_are_the_same_in_every_process(bench: Workbench) -> None:
    again = Workbench(bench.family, {}, bench.device)
    one, other = bench.set_up(PROBLEM), again.set_up(PROBLEM)
    assert one.inputs(0).x.equal(other.inputs(0).x)
    assert one.weights(1).w.equal(other.weights(1).w)
    assert not one.weights(0).w.equal(one.weights(1).w)


def test_a_worker_runs_the_familys_own_kernels_whatever_backends_were_chosen(bench: Workbench, cells: Cells) -> None:
    post = Post(device=bench.device, family="faulty", backends=(Torch(),), python_path=())
    found = ready_tools(post, cells).bench  # type: ignore[arg-type]
    labels = [found.implementation(Candidate.of(label, {})).label for label in ("faulty", "torch")]
    assert labels == ["faulty", "torch"]


def test_the_cache_keeps_the_last_used_within_its_budget() -> None:
    import torch

    cache, made = OperandCache(1000), []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.zeros(400, dtype=torch.int8)

    for name in ("a", "b", "a", "c", "a", "b"):
        cache.get((name,), lambda name=name: make(name))  # type: ignore[misc]
    assert made == ["a", "b", "c", "b"]


class Seen(Neighbours):
    """What was seen of others at each look, written down beforehand: there is no GPU to share here."""

    def __init__(self, *looks: bool) -> None:
        self._looks = list(looks)

    def look(self) -> bool:
        return self._looks.pop(0)


@pytest.mark.parametrize(
    ("looks", "shared"),
    [((True, False), False), ((False, True, False), False), ((False, True, True), True)],
    ids=["before only", "once", "twice"],
)
def test_finals_beside_another_process_are_raced_again_and_then_marked(
    tools: Tools, looks: tuple[bool, ...], shared: bool
) -> None:
    seen = Seen(*looks)
    trials = _finals(_candidate("right"), _candidate("slow")).run(replace(tools, neighbours=seen))
    assert seen._looks == []
    assert {t.shared for t in trials} == {shared}
    found = _by_kind(trials)
    assert found["right"].status is Status.OK
    assert len(found["right"].samples_us) == 5


class OverlappingClock(CpuClock):
    """Launches back to back are worth timing together."""

    overlaps = True


class Paced:
    """A launch of which its clock knows how long it takes."""

    def __init__(self, launch: Launch, time_us: float) -> None:
        self._launch, self.time_us = launch, time_us

    def __call__(self) -> torch.Tensor:
        return self._launch()


class PacedClock(CpuClock):
    """Tells of each launch the time that it is said to take: no machine is too busy for that."""

    overlaps = True

    def blocks(self, blocks: Sequence[Sequence[Call]], least_us: float = 0.0) -> list[float]:
        return [self.replay(block)() for block in blocks]

    def replay(self, launches: Sequence[Call]) -> Replay:
        def once() -> float:
            for launch in launches:
                launch()
            return sum(getattr(launch, "time_us", 1.0) for launch in launches) / len(launches)

        return once


@pytest.fixture
def paced(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Tools with which a candidate takes its PACE_MS, without anybody waiting for it."""
    binder = Setup.binder

    def to(setup: Setup, candidate: Candidate) -> Callable[[int], Paced]:
        knobs = candidate.knobs
        bind = binder(setup, Candidate.of("faulty", {**knobs, "PACE_MS": 0}))
        return lambda index: Paced(bind(index), 1000 * float(str(knobs["PACE_MS"])) or 1.0)

    monkeypatch.setattr(Setup, "binder", to)
    return replace(tools, clock=PacedClock())


def test_short_launches_are_screened_in_blocks(tools: Tools, bench: Workbench) -> None:
    timer = replace(TIMER, block_us=1e6)
    for clock, launches, samples in ((CpuClock(), 3, 3), (OverlappingClock(), 16, 2)):
        bench.launched.clear()
        bench.once_us.clear()
        [trial] = _screen("right", launches=3, timer=timer).run(replace(tools, clock=clock))
        assert (trial.launches, len(trial.samples_us)) == (launches, samples)
        [launched] = bench.launched.values()
        assert launched >= launches, "what ran is counted"
    [trial] = _screen("right", launches=40, timer=timer).run(replace(tools, clock=OverlappingClock()))
    assert (trial.launches, len(trial.samples_us)) == (40, 5), "as many launches as were asked for"


def test_who_is_far_behind_has_no_blocks(paced: Tools) -> None:
    requests = tuple(Request(candidate=_candidate("right", pace_ms=pace), launches=3) for pace in (0, 6))
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=replace(TIMER, block_us=1e6))
    quick, slow = job.run(paced)
    assert (quick.launches, slow.launches) == (16, 3)


@pytest.mark.parametrize("glance", [True, False])
def test_a_glance_at_who_is_far_behind_is_one_launch(paced: Tools, bench: Workbench, glance: bool) -> None:
    paces = (3.0, 3.01, 3.02, 3.03, 3.04, 9.0)
    requests = tuple(Request(candidate=_candidate("right", pace_ms=p), launches=3, glance=glance) for p in paces)
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=TIMER)
    *near, far = job.run(paced)
    assert {t.status for t in near} == {Status.OK}
    assert {len(t.samples_us) for t in near} == {3}
    assert (far.status, far.launches) == ((Status.DROPPED, 1) if glance else (Status.OK, 3))
    assert far.look == 3, "what was asked for is answered, also for a run that is resumed"
    assert far.time_us == 9_000
    # First launches, one of each alone, and the samples.
    assert bench.launched[PROBLEM.id, far.candidate.id] == (2 if glance else 5)


def test_too_few_tell_who_is_far_behind(paced: Tools) -> None:
    """Nothing is checked yet: a kernel that computes nothing is the fastest, and puts nobody out."""
    requests = tuple(Request(candidate=_candidate("right", pace_ms=p), launches=3, glance=True) for p in (0, 5, 6))
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=TIMER)
    trials = job.run(paced)
    assert [t.status for t in trials] == [Status.OK] * 3


@pytest.mark.parametrize(("extra_bytes", "dropped"), [(0, True), (1, False)])
def test_a_librarys_time_is_believed(
    paced: Tools, monkeypatch: pytest.MonkeyPatch, extra_bytes: int, dropped: bool
) -> None:
    """One launch of it tells who is behind, unless it bought its speed with memory."""
    prepared = Setup.prepared
    monkeypatch.setattr(Setup, "prepared", lambda *words: replace(prepared(*words), extra_bytes=extra_bytes))
    requests = tuple(Request(candidate=_candidate("right", p), launches=3, glance=True) for p in (1, 6))
    job = ScreenJob(stage="screen", problem=PROBLEM, requests=requests, timer=TIMER, library=frozenset({"faulty"}))
    _, slow = job.run(paced)
    assert slow.status is (Status.DROPPED if dropped else Status.OK)


def test_who_was_launched_before_is_not_launched_alone_again(paced: Tools, bench: Workbench) -> None:
    for launches, expected in ((3, 5), (12, 17)):
        _screen("right", launches=launches).run(paced)
        assert list(bench.launched.values()) == [expected]


def test_a_long_look_takes_no_more_than_is_affordable(paced: Tools) -> None:
    request = Request(candidate=_candidate("right", pace_ms=2), launches=40)
    for budget_ms, samples in ((200, 40), (13, 6), (0, 3)):
        paced.bench.once_us.clear()
        job = ScreenJob(stage="screen", problem=PROBLEM, requests=(request,), timer=replace(TIMER, budget_ms=budget_ms))
        [trial] = job.run(paced)
        assert len(trial.samples_us) == samples


def test_every_round_has_its_own_order(tools: Tools, cells: Cells) -> None:
    """In any fixed order the same rival would pay for what a hungry kernel does to the clocks."""
    pair = [_candidate("right", pace_ms=2), _candidate("right", pace_ms=2.1)]
    trials = _finals(*pair, kept=frozenset(c.id for c in pair)).run(tools)
    assert [len(t.samples_us) for t in trials] == [5, 5]
    checked = cells.positions.index(TOGETHER)
    raced = [position for position in cells.positions[checked:] if position >= 0]
    assert sorted(raced) == [0] * 5 + [1] * 5
    assert len({tuple(raced[i : i + 2]) for i in range(0, 10, 2)}) == 2


def test_who_is_far_behind_is_checked_and_not_raced(paced: Tools) -> None:
    quick, slow, wrong = _candidate("right", 1), _candidate("right", 8), _candidate("untouched", 9)
    found = {t.candidate: t for t in _finals(quick, slow, wrong).run(paced)}
    assert (found[quick].status, len(found[quick].samples_us)) == (Status.OK, 5)
    assert (found[slow].status, found[slow].launches) == (Status.DROPPED, 1)
    assert found[slow].err_ratio is not None and found[slow].err_ratio < 0.05
    assert found[slow].time_us == 8_000
    assert found[wrong].status is Status.WRONG
    for role in ("library", "kept"):
        found = {t.candidate: t for t in _finals(quick, slow, **{role: frozenset({slow.id})}).run(paced)}
        assert (found[slow].status, len(found[slow].samples_us)) == (Status.OK, 5), "compared with to the end"


class _Hasty(CpuClock):
    """Sees every other look at a launch four times too long, as where the host falls behind; no two alike."""

    def __init__(self) -> None:
        self.looks = 0

    def sequence(self, launches: Sequence[Call], least_us: float = 0.0) -> list[float]:
        times = []
        for launch in launches:
            launch()
            self.looks += 1
            times.append((36.0 if self.looks % 2 else 9.0) + 0.4 * (self.looks % 5))
        return times


def test_samples_of_all_who_may_win_have_as_many_launches(tools: Tools) -> None:
    """Starting a graph takes some microseconds: divided by other numbers of launches, it would decide."""
    finalists = [_candidate("right", pace_ms=pace) for pace in (0, 0.001, 0.002, 0.003)]
    trials = _finals(*finalists).run(replace(tools, clock=_Hasty()))
    assert {trial.status for trial in trials} <= {Status.OK, Status.DROPPED}
    assert len({trial.launches // len(trial.samples_us) for trial in trials}) == 1
