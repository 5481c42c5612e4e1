"""How the rows of a mixture of experts spread over the experts: named routings, and profiles of counted ones.

A profile is the sorted load of the experts: the busiest, the second, the third and fifth busiest and so on by powers of
two, and the same from the idlest on; each load relative to the mean, joined by slashes (`3.1/2.2/1.4/0.8/0.3`).
"""

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

from gemmpipe.core.errors import UserError, quoted_repr, suggest
from gemmpipe.core.files import is_number

if TYPE_CHECKING:
    import torch

ROUTING = "routing"
"""The key column of a family with experts."""
UNIFORM = "uniform"
POPULARITY = {UNIFORM: 0.0, "skewed": 0.75, "very_skewed": 1.5}
"""Standard deviation of the experts' popularity in a named routing, relative to that of a row's own preference."""
USUAL_POPULARITY = 0.25
"""That of a key without a routing. With 8 of 128 experts per row the busiest expert gets 2.7 times the mean and the
idlest a fifth of it, with 2 of 8 it is 1.6 and 0.6 (4096 rows)."""
ONE_HOT = "one_hot"
"""One expert has a part of every row, the others as usual."""
ROUTINGS = (*POPULARITY, ONE_HOT)
_MAX_LOADS = 64
_ROUNDING = 1.1
"""The most by which the two digits of a captured profile can raise its greatest load relative to the mean."""


def parse_routing(text: str) -> str | tuple[float, ...]:
    """A routing's name, or the loads of a profile. Raises UserError (what was expected)."""
    if text in ROUTINGS:
        return text
    cells = text.split("/")
    if 2 <= len(cells) <= _MAX_LOADS and all(is_number(cell) for cell in cells):
        loads = tuple(float(cell) for cell in cells)
        if all(math.isfinite(load) and load >= 0 for load in loads) and sum(loads) > 0:
            return loads
    expected = f"one of {', '.join(ROUTINGS)}, or loads of the experts such as 3.1/1.2/0.4"
    raise UserError(f"{quoted_repr(text)}, expected {expected}{suggest(text, ROUTINGS)}")


def profile_ranks(experts: int) -> list[int]:
    """The ranks by load that a profile has, ascending: 0, 1, 2, 4 ... and the same from the last on."""
    near = [0, *(1 << i for i in range(experts.bit_length()) if 1 << i < experts)]
    half = [rank for rank in near if 2 * rank <= experts]
    return sorted({*half, *(experts - 1 - rank for rank in half)})


def profile_of(counts: Sequence[Sequence[int]]) -> str | None:
    """The profile of the experts' counts in each layer: the mean of the layers' sorted loads; None without counts."""
    layers = [sorted(layer, reverse=True) for layer in counts if sum(layer)]
    if not layers:
        return None
    experts = len(layers[0])
    loads = [sum(layer[rank] * experts / sum(layer) for layer in layers) / len(layers) for rank in range(experts)]
    return "/".join(f"{loads[rank]:.2g}" for rank in profile_ranks(experts))


def loads_of(profile: Sequence[float], experts: int) -> list[float]:
    """The load of each expert, the busiest first, with a mean of 1: geometric between the ranks of the profile."""
    ranks = profile_ranks(experts)
    if len(ranks) != len(profile):  # of another number of experts: the same curve
        ranks = [round(i * (experts - 1) / (len(profile) - 1)) for i in range(len(profile))]
    found = []
    for rank in range(experts):
        after = next(i for i, each in enumerate(ranks) if each >= rank)
        low, high = ranks[max(after - 1, 0)], ranks[after]
        share = 1.0 if high == low else (rank - low) / (high - low)
        found.append(profile[max(after - 1, 0)] ** (1 - share) * profile[after] ** share)
    mean = sum(found) / experts
    return [load / mean for load in found]


def greatest_load(profile: Sequence[float], experts: int) -> float:
    """The load of the busiest expert relative to the mean, at least: a profile has not all experts' loads.

    Between the ranks of a profile of this many experts loads may be as great as that of the busier neighbour.
    """
    ranks = profile_ranks(experts)
    if len(ranks) != len(profile):
        return loads_of(profile, experts)[0]
    ends = (*ranks[1:], experts)
    return profile[0] * experts / sum(load * (end - rank) for load, rank, end in zip(profile, ranks, ends, strict=True))


def impossible_reason(routing: str, experts: int, topk: int) -> str | None:
    """Why no rows with `topk` different experts each have this routing, as a predicate; None if some have.

    Raises UserError as `parse_routing`.
    """
    profile = parse_routing(routing)
    if isinstance(profile, str):
        return None
    if list(profile) != sorted(profile, reverse=True):
        return "increases, expected the busiest expert's load first"
    greatest, most = greatest_load(profile, experts), experts / topk
    if greatest <= most * _ROUNDING:
        return None
    return (
        f"gives the busiest of {experts} experts {greatest:.3g} times the mean load, expected at most {most:.3g}: "
        f"with topk {topk} every row then has it"
    )


def choose_experts(
    rows: int, experts: int, topk: int, routing: str | None, generator: "torch.Generator"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """(ids [rows, topk] int64, all different within a row, and their preferences in fp32) of random rows.

    In skewed routings the experts' popularity has the quantiles of its distribution, in random order: drawn one by one,
    the number of experts that 256 rows reach varied by 11 % from draw to draw (very_skewed, 8 of 256 experts), and with
    it the bytes of a launch; now by 4 %.
    """
    import torch

    known = None if routing is None else parse_routing(routing)
    logits = torch.randn(rows, experts, generator=generator, device=generator.device)
    if isinstance(known, str) and known in POPULARITY:
        popularity = torch.tensor(_popularity(experts, POPULARITY[known]), device=generator.device)
        logits += popularity[torch.randperm(experts, generator=generator, device=generator.device)]
    else:  # so small that draws hardly differ
        logits += USUAL_POPULARITY * torch.randn(experts, generator=generator, device=generator.device)
    if isinstance(known, tuple):
        ids = _ids_with_loads(rows, topk, loads_of(known, experts), generator)
        return ids, logits.gather(1, ids)
    if known == ONE_HOT:
        hot = torch.randint(experts, (1,), generator=generator, device=generator.device)
        logits.index_fill_(1, hot, 8.0)
    best = logits.topk(topk, dim=1)
    return best.indices, best.values


def _ids_with_loads(rows: int, topk: int, loads: Sequence[float], generator: "torch.Generator") -> "torch.Tensor":
    """[rows, topk] ids: each expert has the given share of the rows, in expectation (systematic sampling)."""
    import torch

    device, experts = generator.device, len(loads)
    shares = torch.tensor(inclusion_shares(loads, topk), dtype=torch.float64, device=device)
    shares = shares[torch.randperm(experts, generator=generator, device=device)]
    order = torch.rand(rows, experts, generator=generator, device=device).argsort(1)
    ends = shares[order].cumsum(1)
    start = torch.rand(rows, 1, generator=generator, device=device, dtype=torch.float64)
    wanted = start + torch.arange(topk, device=device)
    # Each expert's interval is at most 1 long, so that no two of the points, which are 1 apart, are in the same one.
    places = torch.searchsorted(ends, wanted.contiguous(), right=True).clamp_(max=experts - 1)
    return order.gather(1, places)


def inclusion_shares(loads: Sequence[float], topk: int) -> list[float]:
    """The share of rows of each expert, at most 1, with a sum of `topk`, otherwise in proportion to the loads."""
    shares = [0.0] * len(loads)
    left = float(topk)
    open_loads = {i: max(load, 1e-9) for i, load in enumerate(loads)}
    while open_loads:
        scale = left / sum(open_loads.values())
        full = [i for i, load in open_loads.items() if load * scale >= 1]
        if not full:
            for i, load in open_loads.items():
                shares[i] = load * scale
            break
        for i in full:
            shares[i] = 1.0
            left -= 1
            del open_loads[i]
    return shares


def expected_experts(rows: int, experts: int, topk: int, routing: str | None) -> float:
    """The number of experts that have rows on average, under the distribution of `choose_experts`."""
    known = None if routing is None else parse_routing(routing)
    if isinstance(known, tuple):
        return _hit(inclusion_shares(loads_of(known, experts), topk), rows)
    if known == ONE_HOT:
        return 1 + (_hit(_popular_shares(experts - 1, topk - 1, USUAL_POPULARITY), rows) if topk > 1 else 0.0)
    return _hit(_popular_shares(experts, topk, USUAL_POPULARITY if known is None else POPULARITY[known]), rows)


def _hit(shares: Sequence[float], rows: int) -> float:
    return sum(1 - (1 - share) ** rows for share in shares)


def _popularity(experts: int, spread: float) -> list[float]:
    """The experts' popularity: the quantiles of a normal distribution with this standard deviation, ascending."""
    return [spread * NormalDist().inv_cdf((rank + 0.5) / experts) for rank in range(experts)]


@functools.lru_cache(maxsize=1024)
def _popular_shares(experts: int, topk: int, spread: float) -> tuple[float, ...]:
    """The share of rows of each expert whose popularity has a standard deviation of `spread`, with a sum of `topk`.

    A row takes an expert whose preference is above the threshold that `topk` experts exceed on average. The counts of
    experts that follow are within 2.5 % of drawn ones, 8 % for `very_skewed` (8 to 512 experts).
    """
    if spread == 0 or topk >= experts:
        return (min(1.0, topk / experts),) * experts
    normal, popularity = NormalDist(), _popularity(experts, spread)
    low, high = -10.0 - max(popularity), 10.0 + max(popularity)
    for _ in range(60):  # halves of the range; the sum of the shares falls with the threshold
        threshold = (low + high) / 2
        shares = tuple(normal.cdf(each - threshold) for each in popularity)
        low, high = (threshold, high) if sum(shares) > topk else (low, threshold)
    return shares
