"""Searches in other processes: same requests as in the driver, shared results, and restarts after a death."""

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
Requested = dict[str, list[tuple[str, int]]]


def _search_context(search: object) -> SearchContext:
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


def _problems(no_words: KernelDefaults, *rows: int) -> list[Problem]:
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
    """Answers every request of the sessions, a problem's requests together."""

    search_pool: SearchPool
    deadline_s: float = 600.0

    def drive(self, problems: list[Problem], meanwhile: Callable[[int], None] = lambda answered: None) -> Requested:
        """Returns the requests of each problem's session, in order."""
        self.search_pool.submit(problems)
        sessions: dict[str, SessionStarted] = {}
        requested: Requested = {}
        end = time.monotonic() + self.deadline_s
        while len(sessions) < len(problems) or not all(b.session.finished for b in sessions.values()):
            assert time.monotonic() < end, "no end"
            self.search_pool.receive()
            sessions |= {b.summary.problem.id: b for b in self.search_pool.started()}
            asked = {name: requests for name, s in sessions.items() if (requests := s.session.ask())}
            if not asked:
                time.sleep(0.002)  # leaves the core to the search
            for name, requests in asked.items():
                requested.setdefault(name, []).extend((r.candidate.id, r.launches) for r in requests)
                self._answer(name, sessions[name], requests)
                meanwhile(sum(map(len, requested.values())))
        self.started = sessions
        return requested

    def _answer(self, name: str, started: SessionStarted, requests: "list[TrialRequest]") -> None:
        for request in requests:
            for build in started.builds[request.candidate.id]:
                facts = BuildFacts(compile_s=0.1, shared_bytes=1024, registers=int(build.id[:2], 16), spills=0)
                self.search_pool.add_build_facts(build.id, facts)
        trials = [_trial(name, request) for request in requests]
        started.session.tell(trials)
        for trial in trials:
            self.search_pool.learn(trial)


@pytest.fixture
def open_pool() -> Iterator[Callable[..., ProcessSearchPool]]:
    opened: list[ProcessSearchPool] = []

    def open_(search: object, count: int = 1, events: Events | None = None) -> ProcessSearchPool:
        opened.append(ProcessSearchPool(_search_context(search), History(), count, events or Events()))
        return opened[-1]

    yield open_
    for each in opened:
        each.close()


def test_a_session_in_a_process_has_the_same_requests_as_an_inline_one(
    open_pool: Callable[..., ProcessSearchPool], no_words: KernelDefaults
) -> None:
    search, problems = default_search(), _problems(no_words, 64)
    in_driver, in_process = Driver(InlineSearchPool(_search_context(search), History())), Driver(open_pool(search))
    assert in_process.drive(problems) == in_driver.drive(problems)
    [name] = in_driver.started
    inline, remote = in_driver.started[name], in_process.started[name]
    assert remote.summary == inline.summary
    assert remote.summary.excluded["candidate"]
    requested = remote.builds.keys()
    assert requested < inline.summary.ids
    assert remote.builds == {name: inline.builds[name] for name in requested}
    assert remote.kernel_names == {name: inline.kernel_names[name] for name in requested}


def test_each_request_comes_once_and_two_processes_share_the_work(
    open_pool: Callable[..., ProcessSearchPool], no_words: KernelDefaults
) -> None:
    pool = open_pool(default_search(), count=2)
    requested = Driver(pool).drive(_problems(no_words, 1, 16, 64, 256))
    assert len(requested) == 4
    for requests in requested.values():
        assert len(requests) == len(set(requests)) >= default_search().seeds
    [usage] = pool.usage()
    assert {"listing", "search", "start"} <= set(usage.busy_s)
    assert abs(usage.unaccounted_s) < 0.02 * usage.wall_s


def test_sessions_learn_from_other_problems(
    open_pool: Callable[..., ProcessSearchPool], no_words: KernelDefaults
) -> None:
    driver = Driver(open_pool(default_search()))
    driver.drive(_problems(no_words, 64))
    [known] = driver.search_pool._history.problems.values()  # type: ignore[attr-defined]
    [second] = driver.drive(_problems(no_words, 128)).values()
    assert second[0][0] == known.best(1)[0].id, "the winner of the nearest problem comes first"


def test_a_session_outlives_its_process(open_pool: Callable[..., ProcessSearchPool], no_words: KernelDefaults) -> None:
    seen: list[Event] = []
    pool = open_pool(default_search(), events=Events(listeners=[seen.append]))
    killed: list[int] = []

    def kill(answered: int) -> None:
        if answered >= 25 * (len(killed) + 1) and len(killed) < 2:
            [process] = [w._process for w in pool._workers]
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    requested = Driver(pool).drive(_problems(no_words, 16, 64), kill)
    assert len(killed) == 2
    assert sum("died" in event.text for event in seen) == 2
    for requests in requested.values():
        assert len(requests) == len(set(requests)), "a result known before is not timed again"
        assert len(requests) >= default_search().seeds


@pytest.mark.slow
@pytest.mark.usefixtures("short_pauses")
def test_a_process_that_always_dies_ends_the_run(
    open_pool: Callable[..., ProcessSearchPool], no_words: KernelDefaults
) -> None:
    with pytest.raises(EnvironmentProblem, match="died 6 times"):
        Driver(open_pool(Deadly(**LIMITS, rungs=looks()))).drive(_problems(no_words, 16))


@pytest.mark.parametrize("kind", [UserError, pytest.param(ZeroDivisionError, marks=pytest.mark.slow)])
def test_an_exception_in_a_search_is_raised_in_the_driver(
    open_pool: Callable[..., ProcessSearchPool], no_words: KernelDefaults, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="no search"):
        Driver(open_pool(Raising(**LIMITS, rungs=looks(), error=kind("no search")))).drive(_problems(no_words, 16))


@pytest.mark.slow
def test_an_ended_session_requests_no_new_candidate(
    open_pool: Callable[..., ProcessSearchPool], no_words: KernelDefaults
) -> None:
    pool = open_pool(default_search())
    pool.submit(_problems(no_words, 64))
    started: list[SessionStarted] = []
    requests: list[TrialRequest] = []
    while not requests:
        pool.receive()
        started += pool.started()
        requests = [r for b in started for r in b.session.ask()]
    session, half = started[0].session, len(requests) // 2
    problem = started[0].summary.problem.id
    session.tell([_trial(problem, r) for r in requests[:half]])
    session.end(len(requests) - half)
    timed, end = {r.candidate for r in requests[:half]}, time.monotonic() + 300
    while not session.finished:
        assert time.monotonic() < end
        pool.receive()
        later = session.ask()
        assert {r.candidate for r in later} <= timed
        if later:
            session.tell([_trial(problem, r) for r in later])
