"""Hunts beside the driver: they ask what hunts here would ask, learn from each other, and outlive their process."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from search_setup import HOPPER, LIMITS, Deadly, Raising, default_search, looks

from gemmpipe.backends.own import Own
from gemmpipe.core.data import BuildFacts, Problem, Status, Trial
from gemmpipe.core.errors import EnvironmentProblem, UserError
from gemmpipe.core.events import Event, Events
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.space import Space
from gemmpipe.search import TrialRequest
from gemmpipe.search.history import History
from gemmpipe.sources.inline import InlineShapes
from gemmpipe.stages.screen.search_pool import InlineSearchPool, SearchContext, SearchPool, SessionStarted
from gemmpipe.stages.screen.search_processes import ProcessSearchPool

AXES = {
    "BLOCK_SIZE_M": (16, 32, 64, 128),
    "BLOCK_SIZE_N": (32, 64, 128),
    "BLOCK_SIZE_K": (128,),
    "GROUP_SIZE_M": (1,),
    "NUM_KSPLIT": (1, 4),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4),
    "cache_modifier": ("",),
    "kernel_type": ("plain", "warp_specialised"),
    "SWAP_AB": (False,),
}
SPACE = Space(axes=AXES, when=(), pinned=())
Asked = dict[str, list[tuple[str, int]]]


def _ground(search: object) -> SearchContext:
    family = load_family("a8w8_blockscale")
    own = tuple(i for b in (Own(label="triton"), Own(label="gluon")) for i in b.implementations(family))
    return SearchContext(
        family=family.name,
        implementations=own,
        device=HOPPER,
        space=SPACE,
        search=search,  # type: ignore[arg-type]
        incumbents={},
        launches=2,
        keep=4,
    )


def _quarries(no_words: KernelDefaults, *rows: int) -> list[Problem]:
    family = load_family("a8w8_blockscale")
    items = [[m, 1280, 8192] for m in rows]
    return InlineShapes(items=items).problems(family, no_words, "sm_90")


def _trial(problem: str, request: TrialRequest) -> Trial:
    knobs = request.candidate.knobs
    time_us = 10.0 + sum(abs(int(knobs.get(name) or 0) - 64) for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N"))
    fails = knobs["num_stages"] == 4 and knobs.get("num_warps") == 8
    return Trial(
        stage="screen",
        problem=problem,
        candidate=request.candidate,
        status=Status.LAUNCH_ERROR if fails else Status.OK,
        launches=0 if fails else request.launches,
        samples_us=() if fails else (time_us,) * request.launches,
    )


@dataclass
class Driver:
    """Answers everything that hunts ask for, a problem's requests together."""

    search_pool: SearchPool
    deadline_s: float = 600.0

    def drive(self, quarries: list[Problem], meanwhile: Callable[[int], None] = lambda answered: None) -> Asked:
        """What each problem's hunt asked for, in order."""
        self.search_pool.submit(quarries)
        courses: dict[str, SessionStarted] = {}
        asked: Asked = {}
        end = time.monotonic() + self.deadline_s
        while len(courses) < len(quarries) or not all(b.session.finished for b in courses.values()):
            assert time.monotonic() < end, "no end"
            self.search_pool.receive()
            courses |= {b.summary.problem.id: b for b in self.search_pool.started()}
            for name, begun in courses.items():
                if requests := begun.session.ask():
                    asked.setdefault(name, []).extend((r.candidate.id, r.launches) for r in requests)
                    self._answer(name, begun, requests)
                    meanwhile(sum(map(len, asked.values())))
        self.started = courses
        return asked

    def _answer(self, name: str, begun: SessionStarted, requests: "list[TrialRequest]") -> None:
        for request in requests:
            for build in begun.builds[request.candidate.id]:
                facts = BuildFacts(compile_s=0.1, shared_bytes=1024, registers=int(build.id[:2], 16), spills=0)
                self.search_pool.add_build_facts(build.id, facts)
        trials = [_trial(name, request) for request in requests]
        begun.session.tell(trials)
        for trial in trials:
            self.search_pool.learn(trial)


@pytest.fixture
def beside() -> Iterator[Callable[..., ProcessSearchPool]]:
    opened: list[ProcessSearchPool] = []

    def open_(search: object, count: int = 1, events: Events | None = None) -> ProcessSearchPool:
        opened.append(ProcessSearchPool(_ground(search), History(), count, events or Events()))
        return opened[-1]

    yield open_
    for each in opened:
        each.close()


def test_a_hunt_beside_asks_what_one_here_asks(
    beside: Callable[..., ProcessSearchPool], no_words: KernelDefaults
) -> None:
    search, quarries = default_search(), _quarries(no_words, 64)
    here, there = Driver(InlineSearchPool(_ground(search), History())), Driver(beside(search))
    assert there.drive(quarries) == here.drive(quarries)
    [name] = here.started
    near, far = here.started[name], there.started[name]
    assert far.summary == near.summary
    assert far.summary.excluded["candidate"]
    asked = far.builds.keys()
    assert asked < near.summary.ids
    assert far.builds == {name: near.builds[name] for name in asked}
    assert far.kernel_names == {name: near.kernel_names[name] for name in asked}


def test_each_request_comes_once_and_two_processes_share_the_work(
    beside: Callable[..., ProcessSearchPool], no_words: KernelDefaults
) -> None:
    hunts = beside(default_search(), count=2)
    asked = Driver(hunts).drive(_quarries(no_words, 1, 16, 64, 256))
    assert len(asked) == 4
    for requests in asked.values():
        assert len(requests) == len(set(requests)) >= default_search().seeds
    [usage] = hunts.usage()
    assert {"listing", "search", "start"} <= set(usage.busy_s)
    assert abs(usage.unaccounted_s) < 0.02 * usage.wall_s


def test_hunts_learn_what_others_found_out(beside: Callable[..., ProcessSearchPool], no_words: KernelDefaults) -> None:
    driver = Driver(beside(default_search()))
    driver.drive(_quarries(no_words, 64))
    [known] = driver.search_pool._history.problems.values()  # type: ignore[attr-defined]
    [second] = driver.drive(_quarries(no_words, 128)).values()
    assert second[0][0] == known.best(1)[0].id, "the winner of the nearest problem comes first"


def test_a_hunt_outlives_its_process(beside: Callable[..., ProcessSearchPool], no_words: KernelDefaults) -> None:
    said: list[Event] = []
    hunts = beside(default_search(), events=Events(listeners=[said.append]))
    killed: list[int] = []

    def kill(answered: int) -> None:
        if answered >= 25 * (len(killed) + 1) and len(killed) < 2:
            [process] = [h._process for h in hunts._workers]
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    asked = Driver(hunts).drive(_quarries(no_words, 16, 64), kill)
    assert len(killed) == 2
    assert sum("died" in event.text for event in said) == 2
    for requests in asked.values():
        assert len(requests) == len(set(requests)), "what was told before is not timed again"
        assert len(requests) >= default_search().seeds


def test_a_process_that_always_dies_ends_the_run(
    beside: Callable[..., ProcessSearchPool], no_words: KernelDefaults
) -> None:
    with pytest.raises(EnvironmentProblem, match="died 6 times"):
        Driver(beside(Deadly(**LIMITS, rungs=looks()))).drive(_quarries(no_words, 16))


@pytest.mark.parametrize("kind", [UserError, ZeroDivisionError])
def test_what_a_search_raises_rises_in_the_driver(
    beside: Callable[..., ProcessSearchPool], no_words: KernelDefaults, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="no hunt today"):
        Driver(beside(Raising(**LIMITS, rungs=looks(), error=kind("no hunt today")))).drive(_quarries(no_words, 16))


def test_an_ended_hunt_asks_for_nobody_new(beside: Callable[..., ProcessSearchPool], no_words: KernelDefaults) -> None:
    hunts = beside(default_search())
    hunts.submit(_quarries(no_words, 64))
    begun: list[SessionStarted] = []
    requests: list[TrialRequest] = []
    while not requests:
        hunts.receive()
        begun += hunts.started()
        requests = [r for b in begun for r in b.session.ask()]
    hunt, half = begun[0].session, len(requests) // 2
    problem = begun[0].summary.problem.id
    hunt.tell([_trial(problem, r) for r in requests[:half]])
    hunt.end(len(requests) - half)
    timed, end = {r.candidate for r in requests[:half]}, time.monotonic() + 300
    while not hunt.finished:
        assert time.monotonic() < end
        hunts.receive()
        later = hunt.ask()
        assert {r.candidate for r in later} <= timed
        if later:
            hunt.tell([_trial(problem, r) for r in later])
