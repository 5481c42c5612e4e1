"""Builds for the two memory orders of x's block scales: screening needs one, the finals compile the other ahead."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from gemmpipe import journal
from gemmpipe.backends.engine import EngineBackend
from gemmpipe.cli.main import main
from gemmpipe.core.data import Build, BuildFacts, Candidate, Knobs, Problem, Trial
from gemmpipe.core.device import arch_device
from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.executors import BuildResult, BuildsAhead
from gemmpipe.executors.local import LocalPool
from gemmpipe.family import Implementation, KernelDefaults, load_family
from gemmpipe.sources.inline import InlineShapes
from gemmpipe.stages import Context
from gemmpipe.stages.bench import Bench
from gemmpipe.stages.compare.entries import LineupEntry
from gemmpipe.stages.compare.lineup import _builds
from gemmpipe.stages.needed_builds import extra_order_builds, screening_builds

FAMILY = load_family("a8w8_blockscale")
DEVICE = arch_device("sm_90")
MODELLED = Path(__file__).parents[1] / "modelled"
FLIPS = "M_MAJOR"  # the constant by which two builds of a Triton kernel differ
WORDS = (
    f"--config-dir={MODELLED}",
    "kernel=a8w8_blockscale",
    "shapes=list",
    "shapes.items=[{M: [1, 16, 64], N: 1280, K: 8192}]",
    "executor=modelled",
    "executor.compile_workers=2",
    "format=[csv]",
    "retune=true",
    "space.BLOCK_SIZE_K=[128]",
    "space.num_stages=[3]",
    "space.num_warps=[4]",
    "hydra.run.dir=run",
)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Build]]:
    """Builds submitted to the pool, by stage."""
    found: dict[str, list[Build]] = {"screen": [], "bench": []}
    stage, finals, compile_ = ["screen"], Bench.run, LocalPool.compile

    def in_finals(own: Bench, tables: dict[str, pd.DataFrame], context: Context) -> dict[str, pd.DataFrame]:
        stage[0] = "bench"
        try:
            return finals(own, tables, context)
        finally:
            stage[0] = "screen"

    def recording_compile(pool: LocalPool, build: Build) -> None:
        found[stage[0]].append(build)
        compile_(pool, build)

    monkeypatch.setattr(Bench, "run", in_finals)
    monkeypatch.setattr(LocalPool, "compile", recording_compile)
    return found


@pytest.fixture
def problems(no_words: KernelDefaults) -> list[Problem]:
    """The problems of WORDS."""
    return InlineShapes(items=[[m, 1280, 8192] for m in (1, 16, 64)]).problems(FAMILY, no_words, DEVICE.gfx)


def _finals(folder: Path, problems: list[Problem]) -> list[tuple[Problem, Trial]]:
    record = journal.read(folder / "run")
    assert {p.id for p in problems} == {name for stage, name in record.finished if stage == "bench"}
    return [(problem, trial) for problem in problems for trial in record.of("bench", problem.id)]


def _further(problem: Problem, candidate: Candidate) -> set[Build]:
    own = {i.label: i for i in FAMILY.implementations}.get(candidate.backend)
    return set(extra_order_builds(own, FAMILY.spec(problem), candidate.knobs, DEVICE)) if own else set()


def _further_ids(folder: Path, problems: list[Problem]) -> dict[str, set[str]]:
    """By problem id, the builds that its finals need beyond screening."""
    needed: dict[str, set[str]] = {}
    for problem, trial in _finals(folder, problems):
        needed.setdefault(problem.id, set()).update(b.id for b in _further(problem, trial.candidate))
    return needed


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "trials.jsonl").read_text().splitlines()]


@pytest.mark.e2e
def test_the_other_order_is_compiled_once_for_finalists_and_before_their_finals(
    folder: Path, submitted: dict[str, list[Build]], problems: list[Problem]
) -> None:
    assert main([*WORDS]) == 0
    needed, rows = _further_ids(folder, problems), _rows(folder)
    further, builds = set.union(*needed.values()), [*submitted["screen"], *submitted["bench"]]
    assert sorted(b.id for b in builds if b.id in further) == sorted(further), "each once"
    assert {b.id for b in builds if _flipped(b)} <= further
    assert 2 * len(further) < len(builds)
    built = {row["id"]: i for i, row in enumerate(rows) if row["row"] == "build"}
    launched = {row["problem"]: i for i, row in enumerate(rows) if row["row"] == "launch" and row["stage"] == "bench"}
    assert launched.keys() == needed.keys()
    assert all(built[b] < launched[p] for p, names in needed.items() for b in names), "no worker compiles them"


@pytest.mark.slow
def test_the_exact_forms_of_an_engines_finalists_are_compiled_before_their_finals(
    folder: Path, submitted: dict[str, list[Build]], problems: list[Problem]
) -> None:
    small = [f"stages.engine.spaces.dense.{name}" for name in ("BLOCK_SIZE_M=[16]", "BLOCK_SIZE_N=[64,128]")]
    assert main([*WORDS, "format=[vllm]", *small, "stages.engine.spaces.dense.num_stages=[3]"]) == 0
    (vllm,) = EngineBackend(engine="vllm").implementations(FAMILY)
    record, rows, form = journal.read(folder / "run"), _rows(folder), vllm.exact_form()
    built = {row["id"]: i for i, row in enumerate(rows) if row["row"] == "build"}
    launched = {r["problem"]: i for i, r in enumerate(rows) if r["row"] == "launch" and r["stage"] == "bench vllm"}
    assert {problem.id for problem in problems} <= launched.keys()
    needed = {
        (problem.id, build.id)
        for problem in problems
        for trial in record.of("bench vllm", problem.id)
        for build in form.builds(FAMILY.spec(problem), trial.candidate.knobs, DEVICE)
    }
    assert all(built[build] < launched[problem] for problem, build in needed), "no worker compiles them"
    compiled = [b.id for b in (*submitted["screen"], *submitted["bench"]) if "group_m" in dict(b.constants)]
    assert len(compiled) == len(set(compiled)), "each once"


@pytest.mark.slow
def test_the_other_order_is_compiled_while_other_problems_are_screened_and_timed(
    folder: Path, submitted: dict[str, list[Build]], problems: list[Problem]
) -> None:
    """An earlier run has timed one problem, so that its search ends at once; one of one row has no other order."""
    earlier = [word for word in WORDS if not word.startswith(("shapes.items", "hydra."))]
    assert main([*earlier, "shapes.items=[{M: 64, N: 1280, K: 8192}]", "hydra.run.dir=earlier"]) == 0
    for builds in submitted.values():
        builds.clear()
    assert main([*WORDS, "executor.compile_ms=50", "search.journals=[earlier]"]) == 0
    rows, needed = _rows(folder), _further_ids(folder, problems)
    assert {b.id for b in submitted["screen"]} & needed[problems[2].id]
    built = [i for i, row in enumerate(rows) if row["row"] == "build" and row["id"] in set.union(*needed.values())]
    timed = [i for i, row in enumerate(rows) if row["row"] == "trial" and row["stage"] == "bench"]
    assert min(timed) < max(built)


@pytest.mark.slow
def test_a_finalist_whose_other_order_does_not_compile_has_a_row(folder: Path, problems: list[Problem]) -> None:
    assert main([*WORDS, f"executor.fails={FLIPS}"]) == 0
    trials = _finals(folder, problems)
    errors = {(p.id, t.candidate.id): t.error for p, t in trials if t.status == "compile_error"}
    assert errors.keys() == {(p.id, t.candidate.id) for p, t in trials if any(map(_flipped, _further(p, t.candidate)))}
    assert set(errors.values()) == {f"RuntimeError: {FLIPS} does not compile"}
    assert len(errors) < len(trials)


def _flipped(build: Build) -> bool:
    return bool(dict(build.constants).get(FLIPS))


def _triton(problem: Problem) -> tuple[Implementation, Knobs]:
    own = next(i for i in FAMILY.implementations if i.label == "triton")
    knobs = own.knobs_from_row({}, FAMILY.spec(problem), DEVICE)
    assert knobs is not None
    return own, knobs


def test_screening_and_extra_builds_are_all_builds(problems: list[Problem]) -> None:
    own, knobs = _triton(problems[1])
    spec = FAMILY.spec(problems[1])
    first, others = screening_builds(own, spec, knobs, DEVICE), extra_order_builds(own, spec, knobs, DEVICE)
    assert (len(first), len(others)) == (1, 1)
    assert {*first, *others} == set(own.builds(spec, knobs, DEVICE))
    assert [_flipped(b) for b in (*first, *others)] == [False, True]


def test_a_workload_of_one_order_has_no_extra_builds(problems: list[Problem]) -> None:
    own, knobs = _triton(problems[1])
    for order in (ROW, COLUMN):
        spec = FAMILY.spec(problems[1]).with_scale_order(order)
        assert spec.x_scale_orders == (order,)
        assert screening_builds(own, spec, knobs, DEVICE) == own.builds(spec, knobs, DEVICE)
        assert not extra_order_builds(own, spec, knobs, DEVICE)
    single = FAMILY.spec(problems[0])
    assert single.with_scale_order(COLUMN) is single, "one row has both orders"
    assert not extra_order_builds(own, single, knobs, DEVICE)


def test_a_comparison_compiles_every_order_at_once(problems: list[Problem]) -> None:
    own, knobs = _triton(problems[1])
    candidate, spec = Candidate.of("triton", knobs), FAMILY.spec(problems[1])
    screened = {candidate.id: screening_builds(own, spec, knobs, DEVICE)}
    listing: Any = SimpleNamespace(spec=spec, builds=screened)
    context: Any = SimpleNamespace(device=DEVICE, implementation=lambda label: own)
    assert len(_builds(LineupEntry(name="tuned", candidate=candidate), listing, context)) == 2


class _Pool(SimpleNamespace):
    """A pool that compiles nothing: what it was sent is in `sent`."""

    def compile(self, build: Build) -> None:
        self.sent.append(build)
        self.open_builds += 1

    def finish(self, ahead: BuildsAhead, build: Build, error: str = "") -> bool:
        self.open_builds -= 1
        return ahead.receive(BuildResult(build=build, facts=BuildFacts(compile_s=1.0, error=error)))


def _numbered(count: int) -> list[Build]:
    parts: dict[str, Any] = {"source_hash": "", "signature": (), "constants": (), "aligned": (), "options": ()}
    return [Build(kernel=f"kernels:k{i}", **parts) for i in range(count)]


def test_builds_ahead_leave_processes_to_the_builds_of_searches() -> None:
    pool, ahead, builds = _Pool(sent=[], open_builds=5, compile_slots=10), BuildsAhead(), _numbered(9)
    ahead.add(builds)
    ahead.add(builds)
    ahead.send(pool, 0.8)
    assert pool.sent == builds[:3]
    ahead.send(pool, 0.5)
    assert len(pool.sent) == 3
    pool.open_builds = 3  # the searches' own are finished
    ahead.send(pool, 0.8)
    assert pool.sent == builds[:8]
    assert pool.finish(ahead, builds[0], "why")
    assert not ahead.receive(BuildResult(build=builds[0], facts=BuildFacts(compile_s=1.0))), "a search's own"
    assert ahead.errors == {builds[0].id: "why"}
    ahead.send(pool, 0.01)
    assert len(pool.sent) == 8
    for build in builds[1:8]:
        pool.finish(ahead, build)
    ahead.send(pool, 0.01)
    assert pool.sent == builds, "one, where the share is less than a process"


def test_builds_that_the_pool_dropped_are_sent_again_and_those_of_no_finalist_are_not() -> None:
    pool, ahead, builds = _Pool(sent=[], open_builds=0, compile_slots=2), BuildsAhead(), _numbered(5)
    ahead.add(builds[:4])
    ahead.send(pool, 1.0)
    pool.finish(ahead, builds[0])
    ahead.take_back([builds[1], builds[4]])
    pool.open_builds = 0
    ahead.replace([builds[4], builds[1], builds[0]])
    pool.sent.clear()
    for _ in range(2):
        ahead.send(pool, 1.0)
    assert pool.sent == [builds[4], builds[1]]
