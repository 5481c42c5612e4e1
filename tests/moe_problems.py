"""Helpers for tests of fused MoE: specs of problems, and the shipped spaces."""

from pathlib import Path

import yaml

from gemmpipe.family import GemmSpec, Inputs, KernelDefaults, Weights, load_family
from gemmpipe.family.moe import require_experts, routing
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space
from gemmpipe.runtime.moe import RoutedOperands

FMOE = load_family("fmoe")
NAMES = ("token", "model_dim", "inter_dim", "expert", "topk")
QWEN = (64, 2048, 768, 128, 8)


def spec_of(
    sizes: tuple[int, ...], gfx: str = "sm_90", dtype: str | None = None, key: dict[str, object] | None = None
) -> GemmSpec:
    defaults, row = KernelDefaults(dtype=dtype, out_dtype=None, bias=None), dict(zip(NAMES, sizes, strict=True))
    return FMOE.spec(make_problem(FMOE, {**row, **(key or {})}, defaults, gfx, "test"))


def routed_operands(spec: GemmSpec, inputs: Inputs, weights: Weights) -> RoutedOperands:
    """The operands of the run time's call for the product."""
    experts, (ids, shares) = require_experts(spec), routing(inputs)
    assert weights.w2 is not None
    return RoutedOperands(
        x=inputs.x,
        w=weights.w,
        w2=weights.w2,
        topk_weights=shares,
        topk_ids=ids,
        w_scale=weights.w_scale,
        w2_scale=weights.w2_scale,
        activation=experts.activation,
        weight_first=experts.weight_first,
    )


def shipped_space(name: str) -> Space:
    axes = yaml.safe_load((Path(__file__).parents[1] / "conf" / "space" / f"{name}.yaml").read_text())
    entries = axes.pop("when", [])
    when = tuple({k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()} for entry in entries)
    return Space(axes={k: tuple(v) for k, v in axes.items()}, when=when, pinned=())
