"""The fused quantisers through their operators, against torch with the same rounding; for _interpret.py and a GPU.

The references round where vLLM's kernels do (csrc, fused_kernels): the norm and its product with the weight to 16 bits,
the sum with the residual only where it is stored, SiLU's product not at all.
"""

from contextlib import ExitStack, nullcontext
from unittest import mock

import torch

from gemmpipe.core.device import arch_device
from gemmpipe.plugins import quantise_operators as operators

FP8 = torch.float8_e4m3fn
LEAST = 1.0 / (448.0 * 512.0)


def quantise(value: torch.Tensor, least: float = LEAST, rounded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 [M, K], scales [M, K / 128]) of fp32 values."""
    groups = value.unflatten(1, (-1, 128))
    scale = (groups.abs().amax(2) / 448.0).clamp_min(least)
    scale = power_of_two(scale) if rounded else scale
    return (groups / scale[..., None]).clamp(-448, 448).flatten(1).to(FP8), scale


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Scales rounded up."""
    return torch.exp2(torch.ceil(torch.log2(scale.double()))).float()


def norm_reference(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(fp8, scales, the sum in x's dtype)."""
    full = x.float() if residual is None else x.float() + residual.float()
    normed = (full * torch.rsqrt(full.square().sum(1, keepdim=True) / x.shape[1] + epsilon)).to(x.dtype)
    quantised, scale = quantise((normed * weight).float())
    return quantised, scale, None if residual is None else full.to(x.dtype)


def silu_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8, scales) of x [M, 2 * size]."""
    gate, up = x.float().chunk(2, 1)
    return quantise(gate * (1.0 / (1.0 + torch.exp(-gate))) * up)


def scales_like(rows: int, groups: int, layout: str, device: str) -> torch.Tensor:
    """NaN [rows, groups], by `rows`, by `columns`, or by `padded` columns."""
    if layout == "rows":
        return torch.full((rows, groups), float("nan"), device=device)
    wide = rows if layout == "columns" else -(-rows // 4) * 4
    return torch.full((groups, wide), float("nan"), device=device).t()[:rows]


def values(m: int, k: int, dtype: torch.dtype, device: str, seed: int, row: int = 0) -> torch.Tensor:
    """Rows of sizes 2^-6 to 2^6 with an outlier each; a row of zeros; rows `row` elements further apart than k."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(m, k, generator=generator) * torch.exp2(torch.randint(-6, 7, (m, 1), generator=generator))
    made[:, k // 3] *= 50
    if m > 1:
        made[m // 2] = 0
    wide = torch.full((m, k + row), float("nan"), dtype=dtype, device=device)
    wide[:, :k] = made.to(dtype)
    return wide[:, :k]


def compare(found: torch.Tensor, scale: torch.Tensor, expected: torch.Tensor, scales: torch.Tensor) -> dict:
    """The share of values that differ, of those that are not subnormal, and the greatest differences.

    Triton's interpreter truncates where fp8 is subnormal; `worst` is relative, and of the least normal number there.
    """
    a, b = found.float(), expected.float()
    normal = b.abs() > 2**-6
    return {
        "different": float((a != b)[normal].float().mean()),
        "worst": float(((a - b).abs() / b.abs().clamp_min(2**-6)).nan_to_num(nan=1e9).max()),
        "scale": float(((scale - scales).abs() / scales).nan_to_num(nan=1e9).max()),
    }


def run(case: dict, device: str = "cpu") -> dict:
    """One case: `op` norm, silu or group, `mk`, `x`, `layout`; `residual`, `row` (further elements between rows)."""
    (m, k), dtype, layout = case["mk"], getattr(torch, case["x"]), case["layout"]
    engine: list[str] = []
    with ExitStack() as stack:
        if device == "cpu":  # the interpreter: the operators see an H200
            stack.enter_context(mock.patch.object(operators, "runs_on", return_value=True))
            stack.enter_context(mock.patch.object(operators, "device_by_index", return_value=arch_device("sm_90")))
            for name in ("device_context", "_current"):
                stack.enter_context(mock.patch.object(operators, name, return_value=nullcontext()))
            stack.enter_context(mock.patch.object(operators, "is_capturing", return_value=False))
        stack.enter_context(mock.patch.dict(operators._ENGINE, clear=True))
        operators.register_quantise_operators(
            {
                name: lambda *operands, name=name: engine.append(name)
                for name in (operators.NORM, operators.SILU, operators.GROUPS)
            }
        )
        run_one = {"norm": _norm, "silu": _silu, "group": _group}[case["op"]]
        return {**run_one(case, m, k, dtype, layout, device), "engine": engine}


def _norm(case: dict, m: int, k: int, dtype: torch.dtype, layout: str, device: str) -> dict:
    x, weight = values(m, k, dtype, device, 1, case.get("row", 0)), values(1, k, dtype, device, 2)[0]
    weight = (weight.abs() + 0.5).to(dtype)
    residual = values(m, k, dtype, device, 3).contiguous() if case.get("residual") else None
    out = torch.full((m, k), float("nan"), dtype=FP8, device=device)
    scale = scales_like(m, k // 128, layout, device)
    expected, scales, total = norm_reference(x, weight, residual, 1e-6)
    torch.ops.gemmpipe.rms_norm_per_block_quant(out, x, weight, scale, 1e-6, None, residual, 128, layout != "rows")
    found = compare(out, scale, expected, scales)
    return found if residual is None else {**found, "residual": torch.equal(residual, total)}


def _silu(case: dict, m: int, size: int, dtype: torch.dtype, layout: str, device: str) -> dict:
    x = values(m, 2 * size, dtype, device, 4)
    out = torch.full((m, size), float("nan"), dtype=FP8, device=device)
    scale = scales_like(m, size // 128, layout, device)
    expected, scales = silu_reference(x)
    torch.ops.gemmpipe.silu_and_mul_per_block_quant(out, x, scale, 128, None, layout != "rows")
    return compare(out, scale, expected, scales)


def _group(case: dict, m: int, size: int, dtype: torch.dtype, layout: str, device: str) -> dict:
    x, rounded = values(m, size, dtype, device, 5, case.get("row", 0)), case.get("rounded", False)
    out = torch.full((m, size), float("nan"), dtype=FP8, device=device)
    scale = scales_like(m, size // 128, layout, device)
    expected, scales = quantise(x.float(), max(1e-10 / 448.0, 1e-10 * rounded), rounded)
    settled = (1e-10, -448.0, 448.0, rounded, layout != "rows", layout == "padded")
    torch.ops.gemmpipe.per_token_group_fp8_quant(x, out, scale, 128, *settled)
    return compare(out, scale, expected, scales)
