"""Operands, the reference, and the errors that the error measure accepts."""

from dataclasses import replace

import pytest
import torch

from gemmpipe.core.spec import scale_order
from gemmpipe.family import GemmSpec, Scaling
from gemmpipe.family.operands import apply_scales, make_inputs, make_weights, quantise_blockwise
from gemmpipe.family.reference import dequantise, error_ratio, product, tolerance

BLOCK = (Scaling(granularity="block", block=(1, 128)), Scaling(granularity="block", block=(128, 128)))


def spec(scaled: bool = True, out: str = "bfloat16", k: int = 300) -> GemmSpec:
    dtype = "float8_e4m3fn" if scaled else "bfloat16"
    x_scale, w_scale = BLOCK if scaled else (None, None)
    return GemmSpec(m=33, n=200, k=k, x_dtype=dtype, w_dtype=dtype, out_dtype=out, x_scale=x_scale, w_scale=w_scale)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8])
def test_quantising_ragged_tiles_and_back_is_close(dtype: torch.dtype) -> None:
    values = torch.randn(130, 300, generator=generator())
    values[5, :128] = 0
    q, scales = quantise_blockwise(values, (1, 128), dtype)
    assert scales.shape == (130, 3)
    back = dequantise(q, scales, BLOCK[0], torch.float32)
    assert torch.isfinite(back).all()
    assert (back - values).norm() < 0.04 * values.norm()


def test_scales_are_applied_to_their_own_tile() -> None:
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    values = apply_scales(scales, (128, 128), torch.ones(130, 200))
    assert values[0, 0] == 1
    assert values[127, 128] == 2
    assert values[128, 127] == 3
    assert values[129, 199] == 4


def test_operands_are_signed_and_spread_over_binades() -> None:
    inputs, weights = make_inputs(spec(k=1024), generator()), make_weights(spec(k=1024), generator())
    assert inputs.x_scale is not None
    assert weights.w_scale is not None
    assert (inputs.x.float() < 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert inputs.x_scale.max() > 8 * inputs.x_scale.min()
    assert weights.w_scale.shape == (2, 8)


@pytest.mark.parametrize(("order", "strides"), [(None, (8, 1)), ("row", (8, 1)), ("column", (1, 33))])
def test_block_scales_are_in_the_order_of_the_spec(order: str | None, strides: tuple[int, int]) -> None:
    case = spec(k=1024)
    assert case.x_scale is not None
    scales = make_inputs(replace(case, x_scale=replace(case.x_scale, order=order)), generator()).x_scale
    assert scales is not None
    assert scales.stride() == strides
    assert scale_order(scales) == (order or "row")
    assert torch.equal(scales, make_inputs(case, generator()).x_scale)


def test_the_order_of_scales_follows_from_strides() -> None:
    storage = torch.arange(64.0)
    known = {(3, 4, 4, 1): "row", (3, 4, 7, 1): "row", (3, 4, 1, 3): "column", (3, 4, 1, 8): "column"}
    known |= {(1, 4, 4, 1): "row", (1, 4, 1, 4): "column", (3, 1, 1, 1): "row", (3, 1, 5, 9): "row", (3, 4, 8, 2): None}
    for (rows, blocks, row, block), order in known.items():
        assert scale_order(storage.as_strided((rows, blocks), (row, block))) == order, (rows, blocks, row, block)


def test_reference_is_the_product_of_the_dequantised_operands() -> None:
    inputs, weights = make_inputs(spec(), generator()), make_weights(spec(), generator())
    assert inputs.x_scale is not None
    assert weights.w_scale is not None
    x = inputs.x.double() * inputs.x_scale.double().repeat_interleave(128, 1)[:, :300]
    w_scale = weights.w_scale.double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    exact = x @ (weights.w.double() * w_scale).t()
    assert (product(spec(), inputs, weights).double() - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scaled", [True, False])
def test_rounding_passes_and_faults_do_not(scaled: bool, out: str) -> None:
    case = spec(scaled, out)
    inputs, weights = make_inputs(case, generator()), make_weights(case, generator())
    reference, allowed = product(case, inputs, weights), tolerance(case)
    right = reference.to(getattr(torch, out))
    assert error_ratio(right, reference, *allowed) < 0.001
    for fault in (
        lambda t: t[7].zero_(),
        lambda t: t[7].mul_(1.05),
        lambda t: t[7].copy_(t[8].clone()),
        lambda t: t.copy_(t.roll(1, 1)),
        lambda t: t.copy_(t.roll(1, 0)),
        lambda t: t[32, 199].fill_(float("nan")),
        lambda t: t[0, 0].fill_(float("inf")),
        lambda t: t.fill_(float("nan")),
        lambda t: t[12, 50].add_(t[12].float().square().mean().sqrt()),
        lambda t: t[:, 128:].mul_(2),
    ):
        wrong = right.clone()
        fault(wrong)
        assert error_ratio(wrong, reference, *allowed) == 1.0


def test_a_scale_of_the_wrong_block_is_detected() -> None:
    case = spec(k=1024)
    inputs, weights = make_inputs(case, generator()), make_weights(case, generator())
    reference = product(case, inputs, weights)
    assert weights.w_scale is not None
    weights.w_scale.copy_(weights.w_scale.roll(1, 1))
    assert error_ratio(product(case, inputs, weights), reference, *tolerance(case)) == 1.0


def test_a_larger_column_may_have_a_larger_error() -> None:
    """Rounding errors are relative: 4.3 % of a column's size, where 12 % of the row's are allowed."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.ones(256)
    sizes[7], sizes[9] = 12.0, 0.1
    ref = torch.randn(4096, 256, generator=generator) * sizes
    off = ref + 0.043 * torch.randn(ref.shape, generator=generator) * sizes
    assert error_ratio(off, ref, 0.12, 2.0**-7) < 0.01
    for wrong in (ref[:, [7]] * 1.5, ref[:, [8]] * 12):
        assert error_ratio(torch.cat([off[:, :7], wrong, off[:, 8:]], 1), ref, 0.12, 2.0**-7) == 1.0
