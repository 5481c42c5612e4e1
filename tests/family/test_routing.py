"""Routings of mixtures of experts: names, profiles, and the rows that they make."""

import statistics

import pytest
import torch
from moe_problems import FMOE, spec_of
from pairwise import pairwise

from gemmpipe.core.errors import UserError
from gemmpipe.family import moe
from gemmpipe.family.operands import random_normal
from gemmpipe.family.routing import (
    ROUTINGS,
    choose_experts,
    expected_experts,
    greatest_load,
    impossible_reason,
    loads_of,
    parse_routing,
    profile_of,
    profile_ranks,
)


def counted(rows: int, experts: int, topk: int, routing: str | None, seed: int = 3) -> list[int]:
    ids, _ = choose_experts(rows, experts, topk, routing, torch.Generator().manual_seed(seed))
    assert all(len(set(row)) == topk for row in ids.tolist())
    return torch.bincount(ids.flatten(), minlength=experts).tolist()


@pytest.mark.parametrize(
    ("experts", "ranks"), [(2, [0, 1]), (8, [0, 1, 2, 3, 4, 5, 6, 7]), (16, [0, 1, 2, 4, 7, 8, 11, 13, 14, 15])]
)
def test_a_profile_is_finer_at_both_ends(experts: int, ranks: list[int]) -> None:
    assert profile_ranks(experts) == ranks


def test_named_routings_are_more_and_more_uneven() -> None:
    busiest = [max(counted(4096, 128, 8, name)) / 256 for name in ("uniform", None, "skewed", "very_skewed")]
    assert busiest == sorted(busiest)
    assert busiest[0] < 1.3
    assert busiest[-1] > 6
    one_hot = sorted(counted(4096, 128, 8, "one_hot"), reverse=True)
    assert one_hot[0] == 4096
    assert one_hot[1] < 1400


@pytest.mark.parametrize(
    ("experts", "topk", "routing"), pairwise([(8, 2), (128, 8), (512, 10)], [None, *ROUTINGS], once=True)
)
def test_a_profile_makes_rows_with_the_loads_that_it_was_made_of(experts: int, topk: int, routing: str | None) -> None:
    counts = counted(8192, experts, topk, routing)
    profile = profile_of([counts])
    assert profile is not None
    assert len(profile) < 120
    again = sorted(counted(8192, experts, topk, profile), reverse=True)
    mean = 8192 * topk / experts
    for before, after in zip(sorted(counts, reverse=True), again, strict=True):
        assert abs(before - after) < 0.3 * before + 0.12 * mean


@pytest.mark.parametrize(
    ("experts", "topk", "routing"),
    pairwise([(8, 2), (128, 8), (512, 10), (16, 1)], [None, *ROUTINGS, "4/2/1/0.5/0.1/0"], once=True),
)
def test_the_expected_experts_are_those_that_drawn_rows_have(experts: int, topk: int, routing: str | None) -> None:
    """Their weights are what a call reads, and its floor: too many of them make a floor that kernels pass."""
    generator = torch.Generator().manual_seed(11)
    for rows in (1, 4, 32, 200):
        drawn = [len(choose_experts(rows, experts, topk, routing, generator)[0].unique()) for _ in range(40)]
        found = expected_experts(rows, experts, topk, routing)
        assert topk - 1e-6 <= found <= experts
        error = 0.08 if routing == "very_skewed" else 0.025
        assert found == pytest.approx(sum(drawn) / len(drawn), rel=error, abs=0.45), rows


@pytest.mark.parametrize(("routing", "spread"), [(None, 0.02), ("skewed", 0.04), ("very_skewed", 0.06)])
def test_draws_of_a_routing_reach_about_as_many_experts(routing: str | None, spread: float) -> None:
    """Their weights are most of what a launch reads: a choice timed on some draws is to be right for others."""
    drawn = [sum(count > 0 for count in counted(256, 256, 8, routing, seed)) for seed in range(24)]
    assert statistics.pstdev(drawn) < spread * statistics.mean(drawn)


def test_layers_are_averaged_by_rank() -> None:
    assert profile_of([[0, 4, 0, 0], [2, 2, 0, 0]]) == "3/1/0/0"
    assert profile_of([[0, 0]]) is None
    assert profile_of([]) is None


def test_a_profile_fits_other_numbers_of_experts() -> None:
    loads = loads_of((4.0, 1.0, 0.5), 9)
    assert loads == sorted(loads, reverse=True)
    assert sum(loads) == pytest.approx(9)


@pytest.mark.parametrize("text", ["skew", "3.1", "1/x", "1/-2", "0/0", "nan/1", "/".join(["1"] * 65)])
def test_what_is_no_routing(text: str) -> None:
    with pytest.raises(UserError, match=r"expected one of uniform, .*3\.1/1\.2"):
        parse_routing(text)


@pytest.mark.parametrize(
    ("routing", "experts", "topk", "reason"),
    [
        (
            "8/0",
            8,
            2,
            "gives the busiest of 8 experts 8 times the mean load, expected at most 4: with topk 2",
        ),
        ("5/3/0/0/0/0/0/0", 8, 2, "gives the busiest of 8 experts 5 times the mean load, expected at most 4"),
        ("1.5/0.5", 2, 2, "gives the busiest of 2 experts 1.5 times the mean load, expected at most 1"),
        ("0.4/1/3", 8, 2, "increases, expected the busiest expert's load first"),
        ("4/4/0/0/0/0/0/0", 8, 2, None),
        ("4/1/1", 8, 2, None),
        ("1/1", 8, 8, None),
        ("6/4/2.5/1.2/0.6/0.3/0.1", 128, 8, None),
        *((name, 2, 2, None) for name in ROUTINGS),
    ],
)
def test_what_no_rows_have(routing: str, experts: int, topk: int, reason: str | None) -> None:
    found = impossible_reason(routing, experts, topk)
    assert found is None if reason is None else str(found).startswith(reason)


@pytest.mark.parametrize(("experts", "topk"), [(2, 1), (8, 2), (8, 8), (21, 20), (128, 4), (128, 3), (512, 10)])
def test_a_captured_profile_is_possible(experts: int, topk: int) -> None:
    """Also that of a few experts with a part of every row, between the ranks of the profile."""
    for routing in (None, *ROUTINGS):
        for rows in (1, 3, 64):
            profile = profile_of([counted(rows, experts, topk, routing)])
            assert profile is not None
            assert impossible_reason(profile, experts, topk) is None, profile
    full = profile_of([[100] * topk + [0] * (experts - topk)])
    assert full is not None
    assert impossible_reason(full, experts, topk) is None
    loads = [float(load) for load in full.split("/")]
    assert greatest_load(loads, experts) <= 1.05 * experts / topk


def test_a_key_has_a_routing() -> None:
    with pytest.raises(UserError, match=r"routing: 'skew', expected one of .*did you mean 'skewed'"):
        spec_of((64, 64, 64, 8, 2), key={"routing": "skew"})
    usual, hot = spec_of((64, 64, 64, 8, 2)), spec_of((64, 64, 64, 8, 2), key={"routing": "one_hot"})
    assert usual.experts is not None
    assert usual.experts.routing is None
    ids, weights = moe.routing(FMOE.make_inputs(hot, torch.Generator().manual_seed(1)))
    assert torch.bincount(ids.flatten().long()).max() == 64
    assert torch.allclose(weights.sum(1), torch.ones(64))
    few = spec_of((64, 64, 64, 8, 2), key={"routing": "4/4/0/0/0/0/0/0"})
    assert moe.expected_experts(few) == pytest.approx(2, abs=1e-3)
    assert moe.bytes_moved(few) < moe.bytes_moved(usual) / 2


def test_a_routing_does_not_change_other_operands() -> None:
    """Figures of keys without a routing stay comparable: their operands are as before routings had names."""
    spec = spec_of((40, 64, 64, 16, 4))
    inputs = FMOE.make_inputs(spec, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    x = random_normal(40, 64, generator)
    logits = torch.randn(40, 16, generator=generator) + 0.25 * torch.randn(16, generator=generator)
    assert torch.equal(inputs.topk_ids, logits.topk(4).indices.int())
    assert torch.equal(inputs.x, x.to(torch.bfloat16))
