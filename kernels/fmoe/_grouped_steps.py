"""The launches of a call that sorts rows by expert first: places, rows there, product, activation, product, sum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemmpipe.data import Build, Device, Knobs, Scalar
from gemmpipe.experts import experts_of
from gemmpipe.family import GemmSpec
from gemmpipe.kernels.fmoe._steps import (
    COLUMNS,
    FP32,
    INT,
    TOP,
    Step,
    bins_and_chunk,
    groups_of,
    most_blocks,
    scales_of,
)
from gemmpipe.launching.workspace import Shape
from gemmpipe.operand_types import element_bytes
from gemmpipe.templates.axes import integer
from gemmpipe.templates.signature import SCALE_BLOCK, TYPES, tile_sizes
from gemmpipe.templates.tiled import ceil_div, hash_of, next_power
from gemmpipe.templates.two_stage import FUSED, knobs_of_stage
from gemmpipe.templates.warp_specialised import descriptor
from gemmpipe.templates.warp_specialised_tiles import GROUP_ROWS, REGISTERS, ROW_BYTES, columns_of, staged_columns

if TYPE_CHECKING:
    import torch

KERNEL = "gemmpipe.kernels.fmoe._grouped:grouped_warp_specialised"
SORTED = "gemmpipe.kernels.fmoe._sorted"
KERNELS = (KERNEL, *(f"{SORTED}:{name}" for name in ("sort_pairs", "sorted_rows", "total_of_places")))
_FEW_ROWS = 16
Box = tuple[list[int], Any]
"""Of what the copy engine moves: its sides, and its layout in shared memory."""


@dataclass(frozen=True, kw_only=True)
class TileStep(Step):
    """One launch of the warp-specialised product."""

    boxes: Mapping[str, Box]

    def build(self, dtypes: Mapping[str, str]) -> Build:
        """The build of it, for every number of rows."""
        absent: dict[str, Scalar] = {p: None for p, t in self.tensors.items() if t is None}
        constants = {**absent, **self.constants}
        signature: dict[str, str] = {}
        for parameter, tensor in self.tensors.items():
            kind = TYPES.get(dtypes.get(tensor or "", ""), "i32")
            if parameter in self.boxes:
                box, layout = self.boxes[parameter]
                signature[parameter] = f"tensordesc<{kind}{box},{layout!r}>"
            else:
                signature[parameter] = f"*{kind}" if tensor else "constexpr"
        pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
        signature |= {**dict.fromkeys(self.integers, "i32"), **dict.fromkeys(self.constants, "constexpr")}
        return Build(
            kernel=KERNEL,
            source_hash=hash_of(KERNEL),
            signature=tuple(signature.items()),
            constants=tuple(constants.items()),
            aligned=pointers,
            options=tuple(sorted(self.options.items())),
        )

    def arguments(self, tensors: "Mapping[str, torch.Tensor | None]") -> dict[str, object]:
        """As any step's, with descriptors: of rows one after the other, whatever they are grouped by."""
        found = super().arguments(tensors)
        for name, (box, layout) in self.boxes.items():
            tensor: Any = found[name]
            found[name] = descriptor(
                tensor.reshape(-1, tensor.shape[-1]) if len(box) > 1 else tensor.reshape(-1), box, layout
            )
        return found


def few_rows(spec: GemmSpec, block_m: int) -> bool:
    """Whether blocks are mostly padding, which is then neither copied nor stored."""
    experts = experts_of(spec)
    return 2 * spec.m * experts.topk < block_m * min(experts.count, spec.m * experts.topk)


def quantises(spec: GemmSpec, knobs: Knobs) -> bool:
    """Whether the first product's kernel quantises h: where a tile holds both sides of a whole group of it."""
    return bool(knobs.get(FUSED)) and experts_of(spec).gated and by_block(spec)


def whole_knobs(knobs: Knobs, stage: int) -> dict[str, Scalar]:
    """A stage's knobs as the templates of Hopper's kernels want them: no tile is split."""
    return {**knobs_of_stage(knobs, stage), "NUM_KSPLIT": 1}


def by_block(spec: GemmSpec) -> bool:
    """Whether scales vary along K."""
    return spec.w_scale is not None and spec.w_scale.granularity == "block"


def capacity_of(spec: GemmSpec, knobs: Knobs) -> int:
    """Places for rows, in whole blocks."""
    block_m = integer(knobs, "BLOCK_SIZE_M")
    return most_blocks(spec, block_m) * block_m


def scratch(spec: GemmSpec, knobs: Knobs) -> dict[str, Shape]:
    """The tensors between the launches."""
    experts, capacity = experts_of(spec), capacity_of(spec, knobs)
    blocks = most_blocks(spec, integer(knobs, "BLOCK_SIZE_M"))
    found: dict[str, Shape] = {
        "places": ((spec.m * experts.topk,), INT),
        "owners": ((blocks,), INT),
        "rows": ((blocks,), INT),
        "blocks": ((1,), INT),
        "sorted": ((capacity, spec.k), spec.w_dtype),
        "inner": ((capacity, experts.inner), spec.w_dtype),
        "parts": ((capacity, spec.n), spec.out_dtype),
    }
    if not knobs.get(FUSED):
        found["wide"] = ((capacity, experts.wide), spec.x_dtype)
    elif experts.quantised and not quantises(spec, knobs):
        found["wide"] = ((capacity, experts.inner), spec.x_dtype)
    if experts.quantised:
        found["inner_scale"] = ((scales_of(experts.quantised, experts.inner), capacity), FP32)
        found["sorted_scale"] = ((scales_of(experts.quantised, spec.k), capacity), FP32)
    elif experts.weight_first:
        found["sorted_scale"] = ((1, capacity), FP32)
    return found


def steps(spec: GemmSpec, knobs: Knobs, device: Device, *, interpreted: bool) -> tuple[Step, ...]:
    """The launches in their order; `interpreted`: for Triton's interpreter, whose bf16 and fp8 need help."""
    experts, fused = experts_of(spec), bool(knobs.get(FUSED))
    found = [_sort_pairs(spec, knobs, interpreted), _bring(spec, knobs, interpreted)]
    wide = "inner" if quantises(spec, knobs) or (fused and not experts.quantised) else "wide"
    found.append(_product(spec, knobs, device, 1, wide))
    if wide == "wide":
        found.append(_activate(spec, knobs, interpreted))
    return (*found, _product(spec, knobs, device, 2, "parts"), _total(spec, interpreted))


def _sort_pairs(spec: GemmSpec, knobs: Knobs, interpreted: bool) -> Step:
    experts = experts_of(spec)
    bins, chunk, warps = bins_and_chunk(spec)
    return Step(
        kernel="sort_pairs",
        module=SORTED,
        tensors={
            "ids_ptr": "ids",
            "places_ptr": "places",
            "owners_ptr": "owners",
            "rows_ptr": "rows",
            "blocks_ptr": "blocks",
        },
        integers={"pairs": spec.m * experts.topk, "experts": experts.count},
        constants={"BLOCK_SIZE_M": knobs["BLOCK_SIZE_M"], "BINS": bins, "CHUNK": chunk, "INTERPRETED": interpreted},
        grid=(experts.count, 1, 1),
        options=_in_turn(warps),
    )


def _bring(spec: GemmSpec, knobs: Knobs, interpreted: bool) -> Step:
    """x to its places, quantised on the way."""
    experts = experts_of(spec)
    own: dict[str, Scalar] = {"TOPK": experts.topk, "SORTED": False, "ACTIVATION": "none", "GATED": False}
    shares = "shares" if experts.weight_first else None
    return _rows(spec, knobs, ("x", "sorted", shares), spec.m, spec.k, own, interpreted)


def _activate(spec: GemmSpec, knobs: Knobs, interpreted: bool) -> Step:
    """h, of what the first product left in `wide`."""
    experts = experts_of(spec)
    left = not knobs.get(FUSED)
    own: dict[str, Scalar] = {
        "TOPK": 1,
        "SORTED": True,
        "ACTIVATION": experts.activation if left else "none",
        "GATED": left and experts.gated,
    }
    return _rows(spec, knobs, ("wide", "inner", None), spec.m * experts.topk, experts.inner, own, interpreted)


def _rows(
    spec: GemmSpec,
    knobs: Knobs,
    names: tuple[str, str, str | None],
    rows: int,
    columns: int,
    own: Mapping[str, Scalar],
    interpreted: bool,
) -> Step:
    """`names`: what is read, what is written, and the shares that its scales are multiplied by."""
    quantised = experts_of(spec).quantised
    x, out, shares = names
    group, groups = groups_of(quantised, columns)
    return Step(
        kernel="sorted_rows",
        module=SORTED,
        tensors={
            "x_ptr": x,
            "out_ptr": out,
            "scale_ptr": f"{out}_scale" if quantised or shares else None,
            "shares_ptr": shares,
            "places_ptr": "places",
        },
        integers={"columns": columns, "capacity": capacity_of(spec, knobs)},
        constants={
            **own,
            "QUANTISED": quantised is not None,
            "GROUPS": groups,
            "GROUP": group,
            "TOP": TOP.get(spec.w_dtype, 1.0),
            "INTERPRETED": interpreted,
        },
        grid=(rows, ceil_div(columns, groups * group), 1),
        options=_in_turn(min(8, max(1, groups * group // 256))),
    )


def _product(spec: GemmSpec, knobs: Knobs, device: Device, stage: int, out: str) -> TileStep:
    experts, own = experts_of(spec), whole_knobs(knobs, stage)
    first = stage == 1
    fused = first and bool(knobs.get(FUSED))
    gated = fused and experts.gated
    x, w = ("sorted", "w") if first else ("inner", "w2")
    scales = spec.w_scale.granularity if spec.w_scale else "none"
    block, paired = by_block(spec), first and quantises(spec, knobs)
    row_scales = not block and (experts.quantised is not None or (first and experts.weight_first))
    w_rows, n = (experts.wide, experts.inner if gated else experts.wide) if first else (spec.n, spec.n)
    few = few_rows(spec, integer(own, "BLOCK_SIZE_M"))
    tiles = most_blocks(spec, integer(own, "BLOCK_SIZE_M")) * ceil_div(n, integer(own, "BLOCK_SIZE_N") // (1 + gated))
    programs = min(device.cu_num, tiles)
    return TileStep(
        kernel=KERNEL.split(":")[1],
        tensors={
            "x": x,
            "w": w,
            "scales": f"{x}_scale" if block else x,
            "out": out,
            "w_scale_ptr": f"{w}_scale" if spec.w_scale else None,
            "row_scale_ptr": f"{x}_scale" if row_scales else None,
            "out_scale_ptr": f"{out}_scale" if paired else None,
            "owners_ptr": "owners",
            "rows_ptr": "rows",
            "blocks_ptr": "blocks",
        },
        integers={
            "N": n,
            "w_rows": w_rows,
            "capacity": capacity_of(spec, knobs),
            "depth": ceil_div(spec.k if first else experts.inner, integer(own, "BLOCK_SIZE_K")),
            "programs": programs,
            "group_m": integer(own, "GROUP_SIZE_M"),
        },
        constants={
            **tile_sizes(own),
            "STAGES": own["num_stages"],
            **dict(zip(("REGISTERS", "LOADER_REGISTERS"), REGISTERS[1], strict=True)),
            "SCALE_BLOCK": SCALE_BLOCK,
            "SCALES": scales,
            "ROW_SCALES": row_scales,
            "ACTIVATION": experts.activation if fused else "none",
            "GATED": gated,
            "TOP": TOP.get(spec.w_dtype, 1.0),
            "FEW": few,
        },
        grid=(programs, 1, 1),
        options={"launch_pdl": True, "num_warps": 4},
        boxes=_boxes(spec, own, gated=gated, few=few, paired=paired),
    )


def _boxes(spec: GemmSpec, own: Knobs, *, gated: bool, few: bool, paired: bool) -> dict[str, Box]:
    from triton.experimental.gluon.language import NVMMASharedLayout

    bits = 8 * int(element_bytes(spec.w_dtype))
    m, n, k = (integer(own, f"BLOCK_SIZE_{axis}") for axis in "MNK")
    columns, out_bits = columns_of(own) // 2 if gated else staged_columns(own), bits if paired else 16
    ring = NVMMASharedLayout(swizzle_byte_width=ROW_BYTES, element_bitwidth=bits, rank=2)
    sides = columns_of(own) if paired else columns_of(own) // 2  # of a warpgroup: one side, or half of each
    x: Box = ([_FEW_ROWS if few else m, k], ring)
    found = {"x": x, "w": ([sides if gated else n, k], ring), "scales": x}
    if by_block(spec):
        flat = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
        found["scales"] = ([m], flat)
    if not few:
        row_bytes = min(128, columns * out_bits // 8)
        found["out"] = (
            [GROUP_ROWS, columns],
            NVMMASharedLayout(swizzle_byte_width=row_bytes, element_bitwidth=out_bits, rank=2),
        )
    return found


def dtypes_of(spec: GemmSpec, knobs: Knobs) -> dict[str, str]:
    """The dtype of every tensor that a step may name."""
    given = {"x": spec.x_dtype, "w": spec.w_dtype, "w2": spec.w_dtype, "out": spec.out_dtype, "ids": INT}
    given |= dict.fromkeys(("w_scale", "w2_scale", "shares"), FP32)
    return given | {name: dtype for name, (_, dtype) in scratch(spec, knobs).items()}


def _total(spec: GemmSpec, interpreted: bool) -> Step:
    experts, block = experts_of(spec), min(COLUMNS, next_power(spec.n))
    return Step(
        kernel="total_of_places",
        module=SORTED,
        tensors={
            "parts_ptr": "parts",
            "shares_ptr": None if experts.weight_first else "shares",
            "places_ptr": "places",
            "out_ptr": "out",
        },
        integers={"N": spec.n},
        constants={"TOPK": experts.topk, "BLOCK": block, "INTERPRETED": interpreted},
        grid=(spec.m, ceil_div(spec.n, block), 1),
        options=_in_turn(4),
    )


def _in_turn(warps: int) -> dict[str, Scalar]:
    """Of a launch that may begin while the one before ends (see _sorted.take_turns)."""
    return {"launch_pdl": True, "num_warps": warps}
