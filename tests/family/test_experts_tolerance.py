"""Bounds of experts in fp8: a kernel whose only errors are the roundings of fp8 is within them, a wrong one is not."""

from collections.abc import Callable

import pytest
import torch
from pairwise import few

from gemmpipe.core.data import Scalar
from gemmpipe.family import GemmSpec, Inputs, KernelDefaults, Weights, load_family
from gemmpipe.family.moe import activate, dequantise_expert, routing
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio

FMOE = load_family("fmoe")
FP8 = torch.float8_e4m3fn
Change = Callable[[torch.Tensor], torch.Tensor]


def _spec(**key: Scalar) -> GemmSpec:
    defaults = KernelDefaults(dtype="float8_e4m3fn", out_dtype=None, bias=None, key={"q_type": key["q_type"]})
    sizes: dict[str, Scalar] = {"token": 70, "model_dim": 128, "inter_dim": 64, "expert": 8, "topk": 1}
    return FMOE.spec(make_problem(FMOE, {**sizes, **key}, defaults, "sm_90", "test"))


def _operands(spec: GemmSpec, seed: int) -> tuple[Inputs, Weights]:
    generator = torch.Generator().manual_seed(seed)
    return FMOE.make_inputs(spec, generator), FMOE.make_weights(spec, generator)


def _rounded(values: torch.Tensor, tile: int) -> torch.Tensor:
    """fp32 [R, C] through fp8 with a scale per `tile` columns, and back."""
    groups = values.split(tile, dim=1)
    scales = [group.abs().amax(1, keepdim=True).clamp_min(1e-12) / torch.finfo(FP8).max for group in groups]
    return torch.cat([(g / s).to(FP8).float() * s for g, s in zip(groups, scales, strict=True)], 1)


def _kernel(spec: GemmSpec, inputs: Inputs, weights: Weights, **changes: Change) -> torch.Tensor:
    """The mixture as kernels compute it: x and h in fp8, the wide product, parts and output in bf16, sums in fp32."""
    experts = spec.experts
    assert experts is not None
    assert experts.quantised is not None
    tile = 128 if experts.quantised.granularity == "block" else max(spec.k, experts.inner)
    ids, shares = routing(inputs)
    changed = {name: changes.get(name, lambda values: values) for name in ("x", "wide", "h", "share")}
    out = torch.zeros(spec.m, spec.n)
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        w, w2 = dequantise_expert(spec, weights, expert, torch.float32)
        wide = (changed["x"](_rounded(inputs.x[rows].float(), tile)) @ w.T).bfloat16().float()
        h = changed["h"](_rounded(activate(spec, changed["wide"](wide)), tile))
        part = (h @ w2.T) * changed["share"](shares[rows, places, None])
        out.index_add_(0, rows, part.bfloat16().float())
    return out.bfloat16().float()


KEYS = [
    {"q_type": "per_token"},
    {"q_type": "per_1x128"},
    {"q_type": "per_token", "inter_dim": 16},
    {"q_type": "per_token", "model_dim": 256, "topk": 4},
    {"q_type": "per_1x128", "model_dim": 256, "inter_dim": 192, "topk": 2},
]


@pytest.mark.parametrize("key", few(KEYS, 0, 1), ids=lambda key: "-".join(map(str, key.values())))
def test_roundings_of_fp8_are_within_the_bounds(key: dict[str, Scalar]) -> None:
    """Also if few columns of h make a row, as scales by row do: 1.2 to 2.2 times the bound with x off the grid."""
    spec = _spec(**key)
    for seed in range(20):
        inputs, weights = _operands(spec, seed)
        reference = FMOE.reference(spec, inputs, weights)
        assert error_ratio(_kernel(spec, inputs, weights), reference, *FMOE.tolerance(spec)) < 0.01, seed


@pytest.mark.parametrize("key", few(KEYS, 0, 4), ids=lambda key: "-".join(map(str, key.values())))
@pytest.mark.parametrize(
    "wrong",
    [
        {"x": lambda x: x.roll(1, 1)},
        {"x": lambda x: torch.cat([x[:, :-16], 0 * x[:, -16:]], 1)},
        {"x": lambda x: x * 1.1},
        {"wide": lambda wide: wide.flip(1)},
        {"wide": lambda wide: torch.cat([wide[:, :-4], 0 * wide[:, -4:]], 1)},
        {"h": lambda h: h * 1.1},
        {"h": lambda h: torch.cat([h[:1] * 2, h[1:]])},
        {"h": lambda h: h.roll(1, 0)},
        {"share": lambda share: share * 1.1},
    ],
    ids=[
        "x_columns",
        "x_last_columns",
        "x_scale",
        "gate_and_up",
        "last_columns",
        "h_scale",
        "h_of_a_row",
        "rows",
        "share",
    ],
)
def test_wrong_kernels_are_not(key: dict[str, Scalar], wrong: dict[str, Change]) -> None:
    spec = _spec(**key)
    for seed in range(4):
        inputs, weights = _operands(spec, seed)
        reference = FMOE.reference(spec, inputs, weights)
        assert error_ratio(_kernel(spec, inputs, weights, **wrong), reference, *FMOE.tolerance(spec)) == 1.0, seed


@pytest.mark.parametrize("q_type", ["per_token", "per_1x128"])
def test_x_is_quantised_exactly(q_type: str) -> None:
    spec = _spec(q_type=q_type, model_dim=256)
    x = _operands(spec, 0)[0].x.float()
    assert torch.equal(_rounded(x, 128 if q_type == "per_1x128" else 256), x)
    assert x.abs().amax(1).log2().round().unique().numel() > 2  # a scale of another row is noticed
