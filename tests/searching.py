"""What tests of searches share: no limits, looks, and a subject made of candidates alone."""

from collections.abc import Sequence

from gemmpipe.data import Candidate, Device, Problem
from gemmpipe.family import GemmSpec
from gemmpipe.search import Subject
from gemmpipe.search.exhaustive import Exhaustive
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
