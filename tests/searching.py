"""What tests of searches share: no limits, looks, the default search, and a subject made of candidates alone."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from gemmpipe.data import Candidate, Device, Problem
from gemmpipe.family import GemmSpec
from gemmpipe.paths import shipped
from gemmpipe.search import Hunt, Subject
from gemmpipe.search.exhaustive import Exhaustive
from gemmpipe.search.gaussian import Gaussian
from gemmpipe.search.halving import Halving
from gemmpipe.search.looks import Looks
from gemmpipe.search.lore import Lore

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


def looks(keep_ratio: float = 0.25, most_launches: int = 16, cutoff: float = 3.0, first_launches: int = 1) -> Looks:
    return Looks(keep_ratio=keep_ratio, first_launches=first_launches, most_launches=most_launches, cutoff=cutoff)


def halving(**words: float) -> Halving:
    return Halving(budget_s=None, budget_trials=None, journals=(), looks=looks(**words))  # type: ignore[arg-type]


def subject(
    candidates: Sequence[Candidate],
    *,
    launches: int = 2,
    keep: int = 5,
    given: Sequence[Candidate] = (),
    spec: GemmSpec = SPEC,
    lore: Lore | None = None,
) -> Subject:
    return Subject(
        problem=PROBLEM,
        spec=spec,
        device=HOPPER,
        candidates=tuple(candidates),
        given=given,
        launches=launches,
        keep=keep,
        lore=lore or Lore(),
    )


def _yaml(name: str) -> dict[str, object]:
    values: dict[str, object] = yaml.safe_load((shipped("conf") / "search" / f"{name}.yaml").read_text())
    return {k: v for k, v in values.items() if k not in ("defaults", "_target_")}


def default_search() -> Gaussian:
    """The default search, from its YAML."""
    words = {**_yaml("_budget"), **_yaml("_looks"), **_yaml("_guided"), **_yaml("gaussian")}
    rungs = {**_yaml("_looks")["looks"], **_yaml("_guided")["looks"]}  # type: ignore[dict-item]
    rungs.pop("_target_")
    return Gaussian(**{**words, "journals": (), "looks": Looks(**rungs)})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Deadly(Halving):
    """Ends whatever process it begins in."""

    def start(self, subject: Subject) -> Hunt:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().start(subject)


@dataclass(frozen=True, kw_only=True)
class Raising(Halving):
    """Cannot begin."""

    error: Exception

    def start(self, subject: Subject) -> Hunt:
        raise self.error
