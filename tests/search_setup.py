"""Helpers for tests of searches: searches without limits, the default search, and a problem of given candidates."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from gemmpipe.core.data import Candidate, Device, Problem
from gemmpipe.core.paths import shipped
from gemmpipe.family import GemmSpec
from gemmpipe.search import SearchProblem, SearchSession
from gemmpipe.search.gaussian_process import Gaussian
from gemmpipe.search.history import History
from gemmpipe.search.simple import Exhaustive, Halving, HalvingConfig

EXHAUSTIVE = Exhaustive(budget_s=None, budget_trials=None, journals=())
PROBLEM = Problem(family="f", key=(("M", 1), ("N", 2), ("K", 3)))
SPEC = GemmSpec(m=1, n=2, k=3, x_dtype="float32", w_dtype="float32", out_dtype="float32")
HOPPER = Device(
    kind="cuda",
    index=0,
    name="NVIDIA H200",
    gfx="sm_90",
    cu_num=132,
    shared_bytes=232448,
    cache_bytes=62914560,
    warp_size=32,
)
LIMITS = {"budget_s": None, "budget_trials": None, "journals": ()}


def looks(
    keep_fraction: float = 0.25, max_launches: int = 16, cutoff: float = 3.0, first_launches: int = 1
) -> HalvingConfig:
    return HalvingConfig(
        keep_fraction=keep_fraction, first_launches=first_launches, max_launches=max_launches, cutoff=cutoff
    )


def halving(**rungs: float) -> Halving:
    return Halving(budget_s=None, budget_trials=None, journals=(), rungs=looks(**rungs))  # type: ignore[arg-type]


def subject(
    candidates: Sequence[Candidate],
    *,
    launches: int = 2,
    keep: int = 5,
    required: Sequence[Candidate] = (),
    spec: GemmSpec = SPEC,
    history: History | None = None,
) -> SearchProblem:
    return SearchProblem(
        problem=PROBLEM,
        spec=spec,
        device=HOPPER,
        candidates=tuple(candidates),
        required=required,
        launches=launches,
        keep=keep,
        history=history or History(),
    )


def _yaml(name: str) -> dict[str, object]:
    values: dict[str, object] = yaml.safe_load((shipped("conf") / "search" / f"{name}.yaml").read_text())
    return {k: v for k, v in values.items() if k not in ("defaults", "_target_")}


def default_search() -> Gaussian:
    """The default search, from its YAML."""
    options = {**_yaml("_budget"), **_yaml("_rungs"), **_yaml("_guided"), **_yaml("gaussian")}
    rungs = {**_yaml("_rungs")["rungs"], **_yaml("_guided")["rungs"]}  # type: ignore[dict-item]
    rungs.pop("_target_")
    return Gaussian(**{**options, "journals": (), "rungs": HalvingConfig(**rungs)})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Deadly(Halving):
    """A search that kills the process in which it starts."""

    def start(self, search_problem: SearchProblem) -> SearchSession:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().start(search_problem)


@dataclass(frozen=True, kw_only=True)
class Raising(Halving):
    """A search that raises `error` when it starts."""

    error: Exception

    def start(self, search_problem: SearchProblem) -> SearchSession:
        raise self.error
