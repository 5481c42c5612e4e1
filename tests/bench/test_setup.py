"""Draws of a routing over which experts are timed."""

import pytest

from gemmpipe.bench.setup import routing_draws
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem

SMALL, DEEPSEEK_V3 = (2048, 768, 128, 8), (7168, 2048, 256, 8)


@pytest.mark.parametrize(
    ("sizes", "tokens", "draws"),
    [(SMALL, 1, 32), (SMALL, 16, 32), (SMALL, 64, 16), (SMALL, 256, 8), (SMALL, 4096, 8), (DEEPSEEK_V3, 32, 8)],
)
def test_few_tokens_of_small_mixtures_have_more_draws(sizes: tuple[int, ...], tokens: int, draws: int) -> None:
    """A replay over all draws is short enough for ten rounds in the finals."""
    family = load_family("fmoe")
    key = dict(zip(("token", "model_dim", "inter_dim", "expert", "topk"), (tokens, *sizes), strict=True))
    defaults = KernelDefaults(dtype="bfloat16", out_dtype=None, bias=None)
    assert routing_draws(family, family.spec(make_problem(family, key, defaults, "sm_90", "case"))) == draws
