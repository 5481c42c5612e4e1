"""What a mixture of experts was given: tensors of any rank, checked once a key against what the experts need."""

from dataclasses import dataclass, replace

import torch

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import UserError, shown
from gemmpipe.family import Family, GemmSpec, Inputs, KeyColumn, Weights
from gemmpipe.operand_types import FP8, WIDE
from gemmpipe.parsing import parse_key
from gemmpipe.runtime.copies import tell_converted
from gemmpipe.runtime.mistakes import Means, either, spec_of
from gemmpipe.runtime.operands import Optional, aligned, as_rows, check_place, name_of, no_tensor, without_memory

OPTIONAL = ("w1_scale", "w2_scale")
"""The operands that may be None."""
_ARGUMENTS = {
    "token": "rows of x",
    "model_dim": "columns of x",
    "inter_dim": "columns of w2",
    "expert": "experts of w1",
    "topk": "columns of topk_ids",
    "act_type": "activation",
    "dtype": "type of x",
    "q_dtype_a": "type of w1",
}
"""Where key columns come from."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Routed:
    """The operands of one call: x [..., K], w [E, wide, K], w2 [E, N, inner], their scales, the routing [..., topk]."""

    x: torch.Tensor
    w: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    w_scale: Optional
    w2_scale: Optional
    activation: str
    weight_first: bool

    @property
    def tensors(self) -> dict[str, Optional]:
        """All tensors by the name that a user knows them under."""
        return {
            "x": self.x,
            "w1": self.w,
            "w2": self.w2,
            "topk_weights": self.topk_weights,
            "topk_ids": self.topk_ids,
            "w1_scale": self.w_scale,
            "w2_scale": self.w2_scale,
        }

    @property
    def rows(self) -> int:
        """How many rows x has."""
        return self.x.shape[:-1].numel()

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that an answer takes for granted."""
        tensors = self.tensors.values()
        shapes = (None if t is None else (t.shape, t.dtype, t.get_device()) for t in tensors)
        unlike = without_memory(*tensors) if self.x.get_device() < 0 else ()
        return (*shapes, *unlike, self.activation, self.weight_first)


def problem_of(family: Family, given: Routed) -> Problem:
    """The family's key for these operands. Raises UserError: operands whose ranks do not go together."""
    if any(given.tensors[word] is None for word in ("w1", "w2", "topk_weights", "topk_ids")):
        raise no_tensor(family.entry_point, given.tensors, optional=OPTIONAL)
    ranks = {"w1": (given.w, 3), "w2": (given.w2, 3)}
    for word, (tensor, rank) in ranks.items():
        if tensor.dim() != rank:
            raise UserError(f"{family.entry_point}: {word} {list(tensor.shape)}, expected {rank} dimensions")
    if given.x.dim() < 1 or given.topk_ids.dim() < 1:
        raise UserError(f"{family.entry_point}: x {list(given.x.shape)}, expected [..., K] with topk_ids [..., topk]")
    inner, weight, x = given.w2.shape[2], name_of(given.w.dtype), name_of(given.x.dtype)
    quantised = "none"
    if given.w_scale is not None:
        quantised = "per_token" if given.w_scale.numel() == given.w.shape[0] * given.w.shape[1] else "per_1x128"
    values: dict[str, Scalar] = {
        "token": given.rows or 1,  # without rows nothing is looked up, but all else is checked
        "model_dim": given.x.shape[-1],
        "inter_dim": inner,
        "expert": given.w.shape[0],
        "topk": given.topk_ids.shape[-1],
        "act_type": given.activation,
        "dtype": x,
        "q_dtype_a": weight,
        "q_dtype_w": weight,
        "q_type": quantised,
        "use_g1u1": int(given.w.shape[1] == 2 * inner),
        "doweight_stage1": int(bool(given.weight_first)),
    }
    return family.problem(tuple((c.name, _cell(family, c, values[c.name])) for c in family.key_columns))


def _cell(family: Family, column: KeyColumn, value: Scalar) -> Scalar:
    try:
        if value is not None and not isinstance(value, str | int | float):
            raise UserError(f"{shown(value)}, expected a word")
        return parse_key(column, value, "")
    except UserError as error:
        raise UserError(f"{family.entry_point}: {_ARGUMENTS.get(column.name, column.name)}: {error}") from None


def experts_of(family: Family, given: Routed, problem: Problem) -> GemmSpec:
    """The experts that these operands are. Raises UserError for one that is not what they need."""
    spec = replace(spec_of(family, problem, lambda means: _mistake(family, given, means)), m=given.rows)
    check(family, given, spec)
    return spec


def _mistake(family: Family, given: Routed, means: Means) -> str | None:
    x, w = name_of(given.x.dtype), name_of(given.w.dtype)
    if x not in WIDE:
        return f"x is {x}, expected {either(WIDE)}"
    if given.w_scale is None and w in FP8:
        return f"w1_scale: none, expected float32 scales for {w} weights"
    if given.w_scale is not None and w in WIDE:
        return f"w1_scale: given, expected none for {w} weights"
    if w != x and w not in FP8:
        return f"w1 is {w}, expected {x} as x, or fp8 with scales"
    (column,) = (c for c in family.key_columns if c.name == "act_type")
    computed = [word for word, meant in column.words if means.spec({"act_type": meant})]
    return f"activation: {given.activation!r} is not computed, expected {either(computed)}" if computed else None


def check(family: Family, given: Routed, spec: GemmSpec) -> None:
    """Raises UserError for an operand that is not what the experts need: shape, type, device."""
    experts, name = spec.experts, family.entry_point
    if experts is None:
        raise UserError(f"{name}: a family of plain products")
    check_place(name, given.x)
    routing = [*given.x.shape[:-1], experts.topk]
    expected: dict[str, list[list[int]]] = {
        "w1": [[experts.count, experts.wide, spec.k]],
        "w2": [[experts.count, spec.n, experts.inner]],
        "topk_weights": [routing, [spec.m, experts.topk]],
        "topk_ids": [routing, [spec.m, experts.topk]],
        "w1_scale": _scale_shapes(spec, experts.count, experts.wide, spec.k),
        "w2_scale": _scale_shapes(spec, experts.count, spec.n, experts.inner),
    }
    for word, tensor in given.tensors.items():
        shapes = expected.get(word)
        if shapes is not None and (list(tensor.shape) not in shapes if tensor is not None else bool(shapes)):
            found = "none" if tensor is None else str(list(tensor.shape))
            raise UserError(f"{name}: {word} {found}, expected {shapes[0] if shapes else 'none for these types'}")
        if tensor is not None and tensor.device != given.x.device:
            raise UserError(f"{name}: {word} is on {tensor.device}, expected {given.x.device} as x")
        if tensor is not None and word.endswith("_scale") and tensor.dtype != torch.float32:
            raise UserError(f"{name}: {word} is {name_of(tensor.dtype)}, expected float32")
    if given.w2.dtype != given.w.dtype:
        raise UserError(f"{name}: w2 is {name_of(given.w2.dtype)}, expected {name_of(given.w.dtype)} as w1")
    if given.topk_ids.is_floating_point() or given.topk_ids.dtype == torch.bool:
        raise UserError(f"{name}: topk_ids is {name_of(given.topk_ids.dtype)}, expected int32")


def _scale_shapes(spec: GemmSpec, count: int, rows: int, columns: int) -> list[list[int]]:
    if spec.w_scale is None:
        return []
    if spec.w_scale.granularity == "row":
        return [[count, rows, 1], [count, rows]]
    return [[count, -(-rows // spec.w_scale.block[0]), -(-columns // spec.w_scale.block[1])]]


def routed_inputs(given: Routed, spec: GemmSpec) -> Inputs:
    """The activations and their routing as kernels read them."""
    return Inputs(
        x=aligned(as_rows(given.x.detach(), spec.m), "x"),
        topk_ids=_as("topk_ids", given.topk_ids.reshape(spec.m, -1), torch.int32),
        topk_weights=_as("topk_weights", given.topk_weights.detach().reshape(spec.m, -1), torch.float32),
    )


def _as(word: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor as kernels read it, of this type."""
    if tensor.dtype != dtype:
        tell_converted(word, tensor, dtype)
        return tensor.to(dtype, memory_format=torch.contiguous_format)
    return aligned(tensor, word)


def routed_weights(given: Routed) -> Weights:
    """The experts' weights and scales as kernels read them."""
    named = (("w1_scale", given.w_scale), ("w2_scale", given.w2_scale))
    w_scale, w2_scale = (None if s is None else aligned(s, word).view(*s.shape[:2], -1) for word, s in named)
    w, w2 = aligned(given.w.detach(), "w1"), aligned(given.w2.detach(), "w2")
    return Weights(w=w, w_scale=w_scale, w2=w2, w2_scale=w2_scale)
