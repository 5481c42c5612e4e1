"""What an entry point was given: tensors of any rank, checked once a key against the product that they mean."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import UserError
from gemmpipe.family import Family, GemmSpec, Inputs, Scaling, Weights

Optional = torch.Tensor | None

_PACKED = 2  # elements in a byte of a type that ends in `_x2`


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """The operands of one call, as the family's kernels take them: scales of any rank, `bias` [N].

    `x` [..., K] with `w` [N, K]; in a batch `x` [B, M, K] with `w` [B, N, K].
    """

    x: torch.Tensor
    w: torch.Tensor
    x_scale: Optional
    w_scale: Optional
    bias: Optional
    out_dtype: torch.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        """[..., N]."""
        return (*self.x.shape[:-1], self.w.shape[-2])


def name_of(dtype: torch.dtype) -> str:
    """Torch's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def problem_of(family: Family, given: Given, flags: Mapping[str, Scalar]) -> Problem:
    """The family's key for these operands; `flags` holds the columns that the operands do not tell.

    Raises UserError: operands whose ranks or inner sizes do not go together.
    """
    x, w = given.x, given.w
    batched = w.dim() == 3 and x.dim() == 3 and x.shape[0] == w.shape[0]
    if not (batched or (w.dim() == 2 and x.dim() >= 1)) or x.shape[-1] != w.shape[-1]:
        shapes = f"x {list(x.shape)} and w {list(w.shape)}"
        raise UserError(f"{family.entry_point}: {shapes}, expected [..., K] and [N, K], or [B, M, K] and [B, N, K]")
    stored, dtype = x.shape[-1], name_of(w.dtype)
    values: dict[str, Scalar] = {
        "B": w.shape[0] if batched else 1,
        "M": x.shape[1] if batched else x.shape[:-1].numel(),
        "N": w.shape[-2],
        "K": stored * _PACKED if dtype.endswith("_x2") else stored,
        "bias": given.bias is not None,
        "dtype": dtype,
        "outdtype": name_of(given.out_dtype),
        "scaleAB": given.x_scale is not None,
        **flags,
    }
    key = tuple((column.name, values.get(column.name, column.default)) for column in family.key_columns)
    return Problem(family=family.name, key=key)


def check(family: Family, given: Given, spec: GemmSpec) -> None:
    """Raises UserError for an operand that is not what the product needs: type, scales, bias, device."""
    name = family.entry_point
    for word, tensor, dtype in (("x", given.x, spec.x_dtype), ("w", given.w, spec.w_dtype)):
        if name_of(tensor.dtype) != dtype:
            raise UserError(f"{name}: {word} is {name_of(tensor.dtype)}, expected {dtype}")
    _check_scale(f"{name}: x_scale", given.x_scale, spec.x_scale, (spec.batch, spec.m, spec.k))
    _check_scale(f"{name}: w_scale", given.w_scale, spec.w_scale, (spec.batch, spec.n, spec.k))
    if given.bias is not None and tuple(given.bias.shape) != (spec.n,):
        raise UserError(f"{name}: bias {list(given.bias.shape)}, expected [{spec.n}]")
    for word, other in (("w", given.w), ("x_scale", given.x_scale), ("w_scale", given.w_scale), ("bias", given.bias)):
        if other is not None and other.device != given.x.device:
            raise UserError(f"{name}: {word} is on {other.device}, expected {given.x.device} as x")


def _check_scale(word: str, scale: Optional, scaling: Scaling | None, sizes: tuple[int, int, int]) -> None:
    if scaling is None:
        if scale is not None:
            raise UserError(f"{word}: given, expected none for these types")
        return
    batch, rows, k = sizes
    tile = scale_tile(scaling, rows, k)
    expected = [1] if scaling.granularity == "tensor" else [batch * -(-rows // tile[0]), -(-k // tile[1])]
    wanted = expected[0] * expected[-1] if len(expected) == 2 else 1
    if scale is None or name_of(scale.dtype) not in (scaling.dtype, "uint8") or scale.numel() != wanted:
        what = "none" if scale is None else f"{name_of(scale.dtype)} {list(scale.shape)}"
        raise UserError(f"{word}: {what}, expected {scaling.dtype} {expected}")


def scale_tile(scaling: Scaling, rows: int, k: int) -> tuple[int, int]:
    """(rows, columns along K) that one scale covers."""
    return {"tensor": (rows, k), "row": (1, k)}.get(scaling.granularity, scaling.block)


def inputs_of(given: Given, spec: GemmSpec) -> Inputs:
    """The activation side as kernels take it: [M, K] and its scales, contiguous; M-major scales in both layouts."""
    shape = (spec.m, -1) if spec.batch == 1 else (spec.batch, spec.m, -1)
    x, scale = given.x.reshape(*shape).contiguous(), given.x_scale
    if scale is None:
        return Inputs(x=x)
    if spec.x_scale is None or spec.x_scale.granularity != "block" or spec.batch != 1:
        return Inputs(x=x, x_scale=scale.contiguous())
    flat = scale if scale.dim() == 2 else scale.reshape(spec.m, -1)
    m_major = flat if spec.m > 1 and flat.t().is_contiguous() else None
    return Inputs(x=x, x_scale=flat.contiguous(), x_scale_t=m_major)


def weights_of(given: Given) -> Weights:
    """The weight side as it was given, with a bias of the output's type."""
    w, scale, bias = given.w, given.w_scale, given.bias
    if bias is not None and bias.dtype != given.out_dtype:
        bias = bias.to(given.out_dtype)
    return Weights(w=w.detach() if w.requires_grad else w, w_scale=scale, bias=bias)


def in_rows(weights: Weights) -> Weights:
    """The weights with contiguous rows: themselves, or copies."""
    if weights.w.is_contiguous() and (weights.w_scale is None or weights.w_scale.is_contiguous()):
        return weights
    scale = weights.w_scale
    return replace(weights, w=weights.w.contiguous(), w_scale=None if scale is None else scale.contiguous())
