"""The launches of one call of the fused experts: sort, product, activation, product, sum, with their builds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gemmpipe.core.data import Build, Knobs, Scalar
from gemmpipe.family import GemmSpec, Scaling
from gemmpipe.family.dtypes import FP8_MAX
from gemmpipe.family.moe import require_experts
from gemmpipe.launch.workspace import TensorShape
from gemmpipe.templates.params import AMD_KNOBS, TRITON_TYPES, int_knob, tile_constants
from gemmpipe.templates.tiled import FUSED_ACT, ceil_div, make_build, next_power_of_2, stage_knobs

if TYPE_CHECKING:
    import torch

MODULE = "gemmpipe.kernels.fmoe._kernel"
OVERLAPPED_MODULE = "gemmpipe.kernels.fmoe._overlapped_kernel"
"""The same kernels under the same names, as launches that begin while the previous one ends."""
KERNELS = ("routed", "activate", "total")
ORDER_MODULE = "gemmpipe.kernels.fmoe._order"
ORDER_KERNELS = tuple(f"{ORDER_MODULE}:{name}" for name in ("order_pairs", "rank_pairs", "place_pairs"))
# At most, by one program; more by two launches. On an H200 (512 experts, 2026-11-26) one takes 3.1 us of 1,280
# pairs and 4.8 of 2,560; two take 3.4 and 3.5 with 512 pairs per program, 4.5 with 2,048 (2,560 pairs).
_PAIRS_OF_ONE_LAUNCH = 1536
_PAIRS_PER_CHUNK = 512  # at least, per program of two launches
_MOST_PAIRS_PER_CHUNK = 2048
_CHUNKS = 32  # beyond so many, chunks have more pairs: each program adds up the counts of all chunks
_CHUNKS_PER_STEP = 16  # whose counts a program adds up at a time
_MAX_WARPS = 16  # 1024 threads on AMD
COLUMNS_PER_PROGRAM = 1024
INT, FP32 = "int32", "float32"
_SIZES = ("N", "K", "columns", "entries")
_STRIDES = ("x_stride", "w_expert_stride", "w_stride", "out_stride")
_ALIGNED = (
    *_SIZES,
    *_STRIDES,
)  # parameters that a build may assume to be multiples of 16; else loads are of one element


@dataclass(frozen=True, kw_only=True)
class LaunchStep:
    """One launch: `tensors` maps pointer parameters to names of tensors, None for one that this build leaves out."""

    kernel: str
    module: str = MODULE
    tensors: Mapping[str, str | None]
    integers: Mapping[str, int]
    constants: Mapping[str, Scalar]
    grid: tuple[int, int, int]
    options: Mapping[str, Scalar] = field(default_factory=lambda: {"num_warps": 4})

    def build(self, dtypes: Mapping[str, str]) -> Build:
        """Its build; `dtypes` are the tensors'."""
        pointers = {p: f"*{TRITON_TYPES.get(dtypes[t], 'i32')}" if t else "constexpr" for p, t in self.tensors.items()}
        aligned = tuple(name for name in _ALIGNED if self.integers.get(name, 1) % 16 == 0)
        return make_build(
            f"{self.module}:{self.kernel}", pointers, self.integers, self.constants, self.options, aligned
        )

    def arguments(self, tensors: "Mapping[str, torch.Tensor | None]") -> dict[str, object]:
        """The value of every parameter that is no constant, from all tensors of the call."""
        return {**{p: tensors[t] for p, t in self.tensors.items() if t is not None}, **self.integers}


def max_blocks(spec: GemmSpec, block_m: int) -> int:
    """The most blocks of rows that any routing makes: every expert may have one partial block."""
    experts = require_experts(spec)
    pairs = spec.m * experts.topk
    return min(pairs, (pairs + min(experts.count, pairs) * (block_m - 1)) // block_m)


def scratch_shapes(spec: GemmSpec, knobs: Knobs) -> dict[str, TensorShape]:
    """(shape, dtype) of the tensors between the launches, by name."""
    experts = require_experts(spec)
    blocks, block_m, pairs = max_blocks(spec, _size(knobs, "M")), _size(knobs, "M"), spec.m * experts.topk
    found: dict[str, TensorShape] = {
        "pairs": ((blocks * block_m,), INT),
        "inner": ((pairs, experts.inner), spec.w_dtype),
        **order_scratch_shapes(spec, block_m),
    }
    if order_chunks(spec) > 1:
        found["places"] = ((pairs,), INT)
    if experts.topk > 1:
        found["parts"] = ((pairs, spec.n), spec.out_dtype)
    if not knobs.get(FUSED_ACT):
        found["wide"] = ((pairs, experts.w1_rows), spec.x_dtype)
    elif experts.quantised:
        found["wide"] = ((pairs, experts.inner), spec.x_dtype)
    if experts.quantised:
        found["q"] = ((spec.m, spec.k), spec.w_dtype)
        found["q_scale"] = ((spec.m, scales_per_row(experts.quantised, spec.k)), FP32)
        found["inner_scale"] = ((pairs, scales_per_row(experts.quantised, experts.inner)), FP32)
    return found


def dtypes_of(spec: GemmSpec, between: Mapping[str, TensorShape]) -> dict[str, str]:
    """The dtype of every tensor that a step may name, including those `between` the launches."""
    given = {"x": spec.x_dtype, "w": spec.w_dtype, "w2": spec.w_dtype, "out": spec.out_dtype, "ids": INT}
    given |= dict.fromkeys(("w_scale", "w2_scale", "shares"), FP32)
    return given | {name: dtype for name, (_, dtype) in between.items()}


def launch_steps(spec: GemmSpec, knobs: Knobs, vendor: str, *, interpreted: bool) -> tuple[LaunchStep, ...]:
    """The launches in their order; `interpreted`: for Triton's interpreter, with bf16 and fp8 corrected."""
    experts = require_experts(spec)
    quantised, fused = experts.quantised, bool(knobs.get(FUSED_ACT))
    pairs = spec.m * experts.topk
    between = {"places_ptr": "places" if order_chunks(spec) > 1 else None, "pairs_ptr": "pairs", "rows_ptr": None}
    found = list(order_steps(spec, knobs, between, vendor, overlap=False))
    if quantised:
        found.append(activate_step(spec, quantised, "x", "q", (spec.m, spec.k), "none", False, interpreted))
    wide = "wide" if quantised or not fused else "inner"
    found.append(_first_product_step(spec, knobs, wide, fused, interpreted))
    if wide != "inner":
        name, gated = ("none", False) if fused else (experts.activation, experts.gated)
        found.append(activate_step(spec, quantised, wide, "inner", (pairs, experts.inner), name, gated, interpreted))
    found.append(_second_product_step(spec, knobs, interpreted))
    if experts.topk > 1:
        found.append(total_step(spec, interpreted))
    return tuple(found)


def overlapped(step: LaunchStep) -> LaunchStep:
    """The step as a launch that begins while the previous one ends."""
    options = {**step.options, "launch_pdl": True}
    if step.module == ORDER_MODULE:
        return replace(step, constants={**step.constants, "OVERLAP": True}, options=options)
    return replace(step, module=OVERLAPPED_MODULE, options=options)


def order_chunks(spec: GemmSpec) -> int:
    """Chunks of pairs that are ordered by expert, with a program each; 1: in one launch, else in two."""
    pairs = spec.m * require_experts(spec).topk
    return 1 if pairs <= _PAIRS_OF_ONE_LAUNCH else ceil_div(pairs, _chunk_size(pairs))


def _chunk_size(pairs: int) -> int:
    """Pairs per program of two launches, a power of two."""
    wanted = max(_PAIRS_PER_CHUNK, next_power_of_2(ceil_div(pairs, _CHUNKS)))
    return min(wanted, max(_PAIRS_PER_CHUNK, _MOST_PAIRS_PER_CHUNK))


def order_scratch_shapes(spec: GemmSpec, block_m: int) -> dict[str, TensorShape]:
    """(shape, dtype) of what the order of pairs is made with, and of the blocks that result."""
    return {
        "counts": ((order_chunks(spec), _order_bins(spec)), INT),
        "owners": ((max_blocks(spec, block_m),), INT),
        "blocks": ((1,), INT),
    }


def order_steps(
    spec: GemmSpec, knobs: Knobs, results: Mapping[str, str | None], vendor: str, *, overlap: bool
) -> tuple[LaunchStep, ...]:
    """Orders pairs by expert; `results`: the tensors of `places_ptr`, `pairs_ptr` and `rows_ptr`, or None.

    Also that of `sources_ptr`, if each place is to get its pair.
    """
    experts, chunks, block_m, bins = require_experts(spec), order_chunks(spec), _size(knobs, "M"), _order_bins(spec)
    pairs = spec.m * experts.topk
    chunk = _chunk_size(pairs) if chunks > 1 else max(128, next_power_of_2(pairs))
    # An AMD barrier does not wait for atomics; those that acquire are waited for.
    ordering = "acq_rel" if vendor == "amd" else "relaxed"
    options: dict[str, Scalar] = {"num_warps": min(_MAX_WARPS, max(4, max(chunk, bins) // 32))}

    def step(
        kernel: str, tensors: Mapping[str, str | None], integers: Mapping[str, int], **constants: Scalar
    ) -> LaunchStep:
        return LaunchStep(
            kernel=kernel,
            module=ORDER_MODULE,
            tensors={"ids_ptr": "ids", "counts_ptr": "counts", **tensors},
            integers={"pairs": pairs, "experts": experts.count, "share": ceil_div(pairs, chunks), **integers},
            constants={"BINS": bins, "CHUNK": chunk, **constants, "OVERLAP": overlap},
            grid=(chunks, 1, 1),
            options=options,
        )

    ranks = {name: results[name] for name in ("places_ptr", "pairs_ptr")}
    sources = results.get("sources_ptr")
    blocks = {"owners_ptr": "owners", "rows_ptr": results["rows_ptr"], "blocks_ptr": "blocks"}
    places = {**ranks, "sources_ptr": sources, **blocks}
    entries = {"entries": max_blocks(spec, block_m) * block_m}
    if chunks == 1:
        fill = 2 * chunk
        return (step("order_pairs", places, entries, ORDERING=ordering, BLOCK_SIZE_M=block_m, FILL=fill),)
    return (
        step("rank_pairs", ranks, entries, ORDERING=ordering, FILL=2 * chunk),
        step("place_pairs", places, {}, BLOCK_SIZE_M=block_m, STEP=_CHUNKS_PER_STEP),
    )


def _order_bins(spec: GemmSpec) -> int:
    """One bin per expert, rounded up to a power of two from 64 on (an AMD warp)."""
    return max(64, next_power_of_2(require_experts(spec).count))


def histogram_bins(spec: GemmSpec) -> int:
    """One bin per expert and one for pairs of no expert, rounded up to a power of two from 64 on (an AMD warp)."""
    return max(64, next_power_of_2(require_experts(spec).count + 1))


def _first_product_step(spec: GemmSpec, knobs: Knobs, out: str, fused: bool, interpreted: bool) -> LaunchStep:
    experts = require_experts(spec)
    x, x_scale = ("q", "q_scale") if experts.quantised else ("x", None)
    tensors = _operands(spec, x, "w", x_scale, out, shares=experts.weight_first)
    sizes = {"N": experts.inner if fused else experts.w1_rows, "K": spec.k, "w_rows": experts.w1_rows}
    own: dict[str, Scalar] = {
        "TOPK": experts.topk,
        "ACTIVATION": experts.activation if fused else "none",
        "GATED": fused and experts.gated,
    }
    return _routed_step(spec, stage_knobs(knobs, 1), tensors, sizes, own, interpreted)


def _second_product_step(spec: GemmSpec, knobs: Knobs, interpreted: bool) -> LaunchStep:
    experts = require_experts(spec)
    x_scale = "inner_scale" if experts.quantised else None
    out = "parts" if experts.topk > 1 else "out"
    tensors = _operands(spec, "inner", "w2", x_scale, out, shares=not experts.weight_first)
    sizes = {"N": spec.n, "K": experts.inner, "w_rows": spec.n}
    own: dict[str, Scalar] = {"TOPK": 1, "ACTIVATION": "none", "GATED": False}
    return _routed_step(spec, stage_knobs(knobs, 2), tensors, sizes, own, interpreted)


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


def _routed_step(
    spec: GemmSpec,
    knobs: Knobs,
    tensors: Mapping[str, str | None],
    sizes: Mapping[str, int],
    own: Mapping[str, Scalar],
    interpreted: bool,
) -> LaunchStep:
    blocks, block_n = max_blocks(spec, _size(knobs, "M")), _size(knobs, "N")
    block = spec.w_scale.block[1] if spec.w_scale and spec.w_scale.granularity == "block" else 1
    return LaunchStep(
        kernel="routed",
        tensors=tensors,
        integers={"pairs": spec.m * require_experts(spec).topk, **sizes, "group_m": int_knob(knobs, "GROUP_SIZE_M")},
        constants={
            **tile_constants(knobs),
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
        options={name: knobs[name] for name in ("num_warps", "num_stages", *AMD_KNOBS) if name in knobs},
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
) -> LaunchStep:
    """Activates and quantises rows: from tensor `x` to `out` of `sizes` (rows, columns)."""
    rows, columns = sizes
    group, groups = quantisation_groups(quantised, columns)
    return LaunchStep(
        kernel="activate",
        tensors={"x_ptr": x, "out_ptr": out, "scale_ptr": f"{out}_scale" if quantised else None},
        integers={"columns": columns},
        constants={
            "ACTIVATION": activation,
            "GATED": gated,
            "GROUPS": groups,
            "GROUP": group,
            "TOP": FP8_MAX.get(spec.w_dtype, 1.0),
            "INTERPRETED": interpreted,
        },
        grid=(rows, ceil_div(columns, groups * group), 1),
        options={"num_warps": min(8, max(1, groups * group // 256))},
    )


def quantisation_groups(quantised: Scaling | None, columns: int) -> tuple[int, int]:
    """(columns per scale, such groups per program)."""
    if quantised is not None and quantised.granularity == "row":
        return next_power_of_2(columns), 1
    return 128, min(COLUMNS_PER_PROGRAM // 128, next_power_of_2(ceil_div(columns, 128)))


def total_step(spec: GemmSpec, interpreted: bool) -> LaunchStep:
    """Adds up each row's parts."""
    block = min(COLUMNS_PER_PROGRAM, next_power_of_2(spec.n))
    return LaunchStep(
        kernel="total",
        tensors={"parts_ptr": "parts", "out_ptr": "out"},
        integers={"N": spec.n},
        constants={"TOPK": require_experts(spec).topk, "BLOCK": block, "INTERPRETED": interpreted},
        grid=(spec.m, ceil_div(spec.n, block), 1),
    )


def scales_per_row(scaling: Scaling, columns: int) -> int:
    """Scales of one row."""
    return ceil_div(columns, scaling.block[1]) if scaling.granularity == "block" else 1


def _size(knobs: Knobs, axis: str) -> int:
    return int_knob(knobs, f"BLOCK_SIZE_{axis}")
