"""Problems spread over several workers: each on one device from its first launch to its finals, also when resumed."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import pytest
from stage_contexts import stage_context

from gemmpipe import journal as journals
from gemmpipe.backends.aten import Torch
from gemmpipe.backends.own import Own
from gemmpipe.bench.jobs import Job
from gemmpipe.bench.timer import Timer
from gemmpipe.bench.worker import WorkerConfig
from gemmpipe.core.data import Problem
from gemmpipe.core.device import cpu_device
from gemmpipe.core.events import Events
from gemmpipe.executors.local import Local, LocalPool
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.space import Space
from gemmpipe.journal import Journal
from gemmpipe.stages import Context
from gemmpipe.stages.bench import Bench
from gemmpipe.stages.screen.stage import Screen

FAULTY = Path(__file__).parents[1] / "faulty"
TIMER = Timer(warmup=0, iters=2, rounds=3, budget_ms=5)
PROBLEMS = [Problem(family="faulty", key=(("M", m), ("N", 32), ("K", 64))) for m in (1, 2, 3, 4, 100, 200)]


@dataclass
class Watched:
    """A pool of two real workers on this CPU, and the workers of each problem."""

    pool: LocalPool
    workers: dict[str, set[int]] = field(default_factory=dict)

    def submit(self, submit: Callable[[Job, int], None]) -> Callable[[Job, int], None]:
        def watched(job: Job, worker: int) -> None:
            self.workers.setdefault(job.problem.id, set()).add(worker)
            submit(job, worker)

        return watched


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.syspath_prepend(str(FAULTY))
    local = Local(workers=None, compile_workers=1, timeout_s=30, compile_timeout_s=30, memory_pct=90)
    configs = [
        WorkerConfig(
            device=replace(cpu_device(), uuid=uuid),
            family="faulty",
            backends=(Own(label="faulty"), Torch()),
            python_path=(str(FAULTY),),
        )
        for uuid in ("first", "second")
    ]
    with LocalPool(local, configs, Events(), ExitStack()) as pool:
        found = Watched(pool)
        monkeypatch.setattr(pool, "submit", found.submit(pool.submit))
        yield found


def _context(folder: Path, pool: LocalPool, no_words: KernelDefaults) -> Context:
    family = load_family("faulty")
    return stage_context(
        folder,
        family,
        no_words,
        pool.devices[0],
        space=Space(axes={"KIND": ("right",), "PACE_MS": (0, 1, 2)}, when=(), pinned=()),
        implementations=(*family.implementations, *Torch().implementations(family)),
        journal=Journal(folder),
        record=journals.read(folder),
        pool_or_none=pool,
        problems=PROBLEMS,
    )


def _tune(context: Context) -> "dict[str, pd.DataFrame]":
    tables = Screen(keep=4, margin_pct=1000, bucket_keep=0, timer=TIMER).run({}, context)
    return Bench(err_ratio=0.05, max_foreign_pct=None, timer=TIMER).run(tables, context)


def _homes(folder: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in (folder / journals.NAME).read_text().splitlines()]
    return {row["problem"]: row["device"] for row in rows if row["row"] == "assignment"}


def test_every_problem_has_one_device_and_both_have_work(
    watched: Watched, tmp_path: Path, no_words: KernelDefaults
) -> None:
    context = _context(tmp_path, watched.pool, no_words)
    trials = _tune(context)["trials"]
    assert set(trials["problem"]) == {p.id for p in PROBLEMS}
    assert {len(workers) for workers in watched.workers.values()} == {1}
    assert set.union(*watched.workers.values()) == {0, 1}
    names = ["first", "second"]
    assert _homes(tmp_path) == {problem: names[worker] for problem, [worker] in watched.workers.items()}
    # Expensive ones start first, so that all devices end together.
    assert list(watched.workers)[:2] == [PROBLEMS[5].id, PROBLEMS[4].id]


def test_a_resumed_run_keeps_each_problem_where_it_was(
    watched: Watched, tmp_path: Path, no_words: KernelDefaults
) -> None:
    before = Journal(tmp_path)
    for problem in PROBLEMS[:4]:
        before.write("assignment", problem=problem.id, device="second")
    before.write("assignment", problem=PROBLEMS[4].id, device="one that is gone")
    before.close()
    _tune(_context(tmp_path, watched.pool, no_words))
    assert {len(workers) for workers in watched.workers.values()} == {1}
    assert [watched.workers[p.id] for p in PROBLEMS[:4]] == [{1}] * 4
    assert set(watched.workers) == {p.id for p in PROBLEMS}
