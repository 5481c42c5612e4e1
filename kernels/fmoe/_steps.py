"""The launches that one call is made of: who is sorted, multiplied, activated and summed, with which build."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gemmpipe.data import Build, Knobs, Scalar
from gemmpipe.experts import experts_of
from gemmpipe.family import GemmSpec, Scaling
from gemmpipe.launching.workspace import Shape
from gemmpipe.templates.axes import AMD_ONLY, integer
from gemmpipe.templates.signature import TYPES, tile_sizes
from gemmpipe.templates.tiled import build_of, ceil_div, next_power
from gemmpipe.templates.two_stage import FUSED, knobs_of_stage

if TYPE_CHECKING:
    import torch

MODULE = "gemmpipe.kernels.fmoe._kernel"
KERNELS = ("align", "routed", "activate", "total")
_CHUNK = 4096
COLUMNS = 1024
TOP = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 240.0}
INT, FP32 = "int32", "float32"
_SIZES = ("N", "K", "columns")  # parameters that a build may count on to be multiples of 16


@dataclass(frozen=True, kw_only=True)
class Step:
    """One launch: `tensors` name what stands behind each pointer parameter, None for one that this build leaves out."""

    kernel: str
    module: str = MODULE
    tensors: Mapping[str, str | None]
    integers: Mapping[str, int]
    constants: Mapping[str, Scalar]
    grid: tuple[int, int, int]
    options: Mapping[str, Scalar] = field(default_factory=lambda: {"num_warps": 4})

    def build(self, dtypes: Mapping[str, str]) -> Build:
        """The build of it; `dtypes` are the tensors'."""
        pointers = {p: f"*{TYPES.get(dtypes[t], 'i32')}" if t else "constexpr" for p, t in self.tensors.items()}
        aligned = tuple(name for name in _SIZES if self.integers.get(name, 1) % 16 == 0)
        return build_of(f"{self.module}:{self.kernel}", pointers, self.integers, self.constants, self.options, aligned)

    def arguments(self, tensors: "Mapping[str, torch.Tensor | None]") -> dict[str, object]:
        """What every parameter that is no constant gets, of all tensors of the call."""
        return {**{p: tensors[t] for p, t in self.tensors.items() if t is not None}, **self.integers}


def most_blocks(spec: GemmSpec, block_m: int) -> int:
    """The most blocks of rows that any routing makes: every expert may leave one unfilled."""
    experts = experts_of(spec)
    pairs = spec.m * experts.topk
    return min(pairs, (pairs + min(experts.count, pairs) * (block_m - 1)) // block_m)


def scratch(spec: GemmSpec, knobs: Knobs) -> dict[str, Shape]:
    """The tensors between the launches."""
    experts = experts_of(spec)
    blocks, block_m, pairs = most_blocks(spec, _size(knobs, "M")), _size(knobs, "M"), spec.m * experts.topk
    found: dict[str, Shape] = {
        "pairs": ((blocks * block_m,), INT),
        "owners": ((blocks,), INT),
        "blocks": ((1,), INT),
        "inner": ((pairs, experts.inner), spec.w_dtype),
    }
    if experts.topk > 1:
        found["parts"] = ((pairs, spec.n), spec.out_dtype)
    if not knobs.get(FUSED):
        found["wide"] = ((pairs, experts.wide), spec.x_dtype)
    elif experts.quantised:
        found["wide"] = ((pairs, experts.inner), spec.x_dtype)
    if experts.quantised:
        found["q"] = ((spec.m, spec.k), spec.w_dtype)
        found["q_scale"] = ((spec.m, scales_of(experts.quantised, spec.k)), FP32)
        found["inner_scale"] = ((pairs, scales_of(experts.quantised, experts.inner)), FP32)
    return found


def dtypes_of(spec: GemmSpec, between: Mapping[str, Shape]) -> dict[str, str]:
    """The dtype of every tensor that a step may name, of those between the launches too."""
    given = {"x": spec.x_dtype, "w": spec.w_dtype, "w2": spec.w_dtype, "out": spec.out_dtype, "ids": INT}
    given |= dict.fromkeys(("w_scale", "w2_scale", "shares"), FP32)
    return given | {name: dtype for name, (_, dtype) in between.items()}


def steps(spec: GemmSpec, knobs: Knobs, *, interpreted: bool) -> tuple[Step, ...]:
    """The launches in their order; `interpreted`: for Triton's interpreter, whose bf16 and fp8 need help."""
    experts = experts_of(spec)
    quantised, fused = experts.quantised, bool(knobs.get(FUSED))
    pairs = spec.m * experts.topk
    found = [align_step(spec, knobs)]
    if quantised:
        found.append(activate_step(spec, quantised, "x", "q", (spec.m, spec.k), "none", False, interpreted))
    wide = "wide" if quantised or not fused else "inner"
    found.append(_first(spec, knobs, wide, fused, interpreted))
    if wide != "inner":
        name, gated = ("none", False) if fused else (experts.activation, experts.gated)
        found.append(activate_step(spec, quantised, wide, "inner", (pairs, experts.inner), name, gated, interpreted))
    found.append(_second(spec, knobs, interpreted))
    if experts.topk > 1:
        found.append(total_step(spec, interpreted))
    return tuple(found)


def align_step(spec: GemmSpec, knobs: Knobs) -> Step:
    experts = experts_of(spec)
    pairs = spec.m * experts.topk
    chunk = min(_CHUNK, max(128, next_power(pairs)))
    return Step(
        kernel="align",
        tensors={"ids_ptr": "ids", "pairs_ptr": "pairs", "owners_ptr": "owners", "blocks_ptr": "blocks"},
        integers={"pairs": pairs, "experts": experts.count},
        constants={"BLOCK_SIZE_M": knobs["BLOCK_SIZE_M"], "BINS": bins_of(spec), "CHUNK": chunk},
        grid=(experts.count, 1, 1),
        options={"num_warps": 8 if chunk == _CHUNK else 4},
    )


def bins_of(spec: GemmSpec) -> int:
    """A bin an expert, one for pairs of no expert, and as many bins as a warp has threads at least."""
    return max(64, next_power(experts_of(spec).count + 1))


def _first(spec: GemmSpec, knobs: Knobs, out: str, fused: bool, interpreted: bool) -> Step:
    experts = experts_of(spec)
    x, x_scale = ("q", "q_scale") if experts.quantised else ("x", None)
    tensors = _operands(spec, x, "w", x_scale, out, shares=experts.weight_first)
    sizes = {"N": experts.inner if fused else experts.wide, "K": spec.k, "w_rows": experts.wide}
    own: dict[str, Scalar] = {
        "TOPK": experts.topk,
        "ACTIVATION": experts.activation if fused else "none",
        "GATED": fused and experts.gated,
    }
    return _routed(spec, knobs_of_stage(knobs, 1), tensors, sizes, own, interpreted)


def _second(spec: GemmSpec, knobs: Knobs, interpreted: bool) -> Step:
    experts = experts_of(spec)
    x_scale = "inner_scale" if experts.quantised else None
    out = "parts" if experts.topk > 1 else "out"
    tensors = _operands(spec, "inner", "w2", x_scale, out, shares=not experts.weight_first)
    sizes = {"N": spec.n, "K": experts.inner, "w_rows": spec.n}
    own: dict[str, Scalar] = {"TOPK": 1, "ACTIVATION": "none", "GATED": False}
    return _routed(spec, knobs_of_stage(knobs, 2), tensors, sizes, own, interpreted)


def _operands(spec: GemmSpec, x: str, w: str, x_scale: str | None, out: str, *, shares: bool) -> dict[str, str | None]:
    return {
        "x_ptr": x,
        "w_ptr": w,
        "x_scale_ptr": x_scale,
        "w_scale_ptr": f"{w}_scale" if spec.w_scale else None,
        "shares_ptr": "shares" if shares else None,
        "out_ptr": out,
        "pairs_ptr": "pairs",
        "owners_ptr": "owners",
        "blocks_ptr": "blocks",
    }


def _routed(
    spec: GemmSpec,
    knobs: Knobs,
    tensors: Mapping[str, str | None],
    sizes: Mapping[str, int],
    own: Mapping[str, Scalar],
    interpreted: bool,
) -> Step:
    blocks, block_n = most_blocks(spec, _size(knobs, "M")), _size(knobs, "N")
    block = spec.w_scale.block[1] if spec.w_scale and spec.w_scale.granularity == "block" else 1
    return Step(
        kernel="routed",
        tensors=tensors,
        integers={"pairs": spec.m * experts_of(spec).topk, **sizes, "group_m": integer(knobs, "GROUP_SIZE_M")},
        constants={
            **tile_sizes(knobs),
            "TOPK": own["TOPK"],
            "SCALES": spec.w_scale.granularity if spec.w_scale else "none",
            "GROUP": block,
            "UNIFORM": block % block_n == 0 and (not own["GATED"] or sizes["N"] % block_n == 0),
            "ACTIVATION": own["ACTIVATION"],
            "GATED": own["GATED"],
            "EVEN_K": sizes["K"] % _size(knobs, "K") == 0,
            "CACHE": knobs["cache_modifier"],
            "INTERPRETED": interpreted,
        },
        grid=(blocks * ceil_div(sizes["N"], block_n), 1, 1),
        options={name: knobs[name] for name in ("num_warps", "num_stages", *AMD_ONLY) if name in knobs},
    )


def activate_step(
    spec: GemmSpec,
    quantised: Scaling | None,
    x: str,
    out: str,
    sizes: tuple[int, int],
    activation: str,
    gated: bool,
    interpreted: bool,
) -> Step:
    rows, columns = sizes
    group, groups = groups_of(quantised, columns)
    return Step(
        kernel="activate",
        tensors={"x_ptr": x, "out_ptr": out, "scale_ptr": f"{out}_scale" if quantised else None},
        integers={"columns": columns},
        constants={
            "ACTIVATION": activation,
            "GATED": gated,
            "GROUPS": groups,
            "GROUP": group,
            "TOP": TOP.get(spec.w_dtype, 1.0),
            "INTERPRETED": interpreted,
        },
        grid=(rows, ceil_div(columns, groups * group), 1),
        options={"num_warps": min(8, max(1, groups * group // 256))},
    )


def groups_of(quantised: Scaling | None, columns: int) -> tuple[int, int]:
    """(columns that share a scale, how many such groups a program takes)."""
    if quantised is not None and quantised.granularity == "row":
        return next_power(columns), 1
    return 128, min(COLUMNS // 128, next_power(ceil_div(columns, 128)))


def total_step(spec: GemmSpec, interpreted: bool) -> Step:
    block = min(COLUMNS, next_power(spec.n))
    return Step(
        kernel="total",
        tensors={"parts_ptr": "parts", "out_ptr": "out"},
        integers={"N": spec.n},
        constants={"TOPK": experts_of(spec).topk, "BLOCK": block, "INTERPRETED": interpreted},
        grid=(spec.m, ceil_div(spec.n, block), 1),
    )


def scales_of(scaling: Scaling, columns: int) -> int:
    """Scales of one row."""
    return ceil_div(columns, scaling.block[1]) if scaling.granularity == "block" else 1


def _size(knobs: Knobs, axis: str) -> int:
    return integer(knobs, f"BLOCK_SIZE_{axis}")
