"""The launch of a product over rows sorted by expert: descriptors, constants, grid."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemmpipe.data import Build, Device, Knobs, Scalar
from gemmpipe.experts import experts_of
from gemmpipe.family import GemmSpec
from gemmpipe.kernels.fmoe._steps import TOP, Step, most_blocks
from gemmpipe.operand_types import element_bytes
from gemmpipe.templates.axes import integer
from gemmpipe.templates.signature import SCALE_BLOCK, TYPES, tile_sizes
from gemmpipe.templates.tiled import ceil_div, hash_of
from gemmpipe.templates.two_stage import FUSED, knobs_of_stage
from gemmpipe.templates.warp_specialised import descriptor
from gemmpipe.templates.warp_specialised_tiles import GROUP_ROWS, REGISTERS, ROW_BYTES, columns_of, staged_columns

if TYPE_CHECKING:
    import torch

KERNEL = "gemmpipe.kernels.fmoe._grouped:grouped_warp_specialised"
_FEW_ROWS = 16
Box = tuple[list[int], Any]
"""Of what the copy engine moves: its sides, and its layout in shared memory."""


@dataclass(frozen=True, kw_only=True)
class TileStep(Step):
    """One launch of the warp-specialised product."""

    boxes: Mapping[str, Box]

    def build(self, dtypes: Mapping[str, str]) -> Build:
        """The build of it, for all numbers of rows that fill their blocks alike (see few_rows)."""
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


def columns_in(spec: GemmSpec, knobs: Knobs, stage: int) -> int:
    """Columns of the first or the second product as it is stored."""
    experts = experts_of(spec)
    return spec.n if stage == 2 else experts.inner if _joined(spec, knobs, stage) else experts.wide


def most_tiles(spec: GemmSpec, knobs: Knobs, stage: int) -> int:
    """Tiles of the first or the second product, whatever the routing."""
    own = whole_knobs(knobs, stage)
    width = integer(own, "BLOCK_SIZE_N") // (2 if _joined(spec, knobs, stage) else 1)
    return most_blocks(spec, integer(own, "BLOCK_SIZE_M")) * ceil_div(columns_in(spec, knobs, stage), width)


def _joined(spec: GemmSpec, knobs: Knobs, stage: int) -> bool:
    """Whether a tile's columns are the gate's and the up side's, which it joins."""
    return stage == 1 and bool(knobs.get(FUSED)) and experts_of(spec).gated


def product(spec: GemmSpec, knobs: Knobs, device: Device, stage: int, out: str) -> TileStep:
    """The first or the second product, into the tensor `out`."""
    experts, own, first = experts_of(spec), whole_knobs(knobs, stage), stage == 1
    gated, paired = _joined(spec, knobs, stage), first and quantises(spec, knobs)
    n = columns_in(spec, knobs, stage)
    few = few_rows(spec, integer(own, "BLOCK_SIZE_M"))
    programs = min(device.cu_num, most_tiles(spec, knobs, stage))
    return TileStep(
        kernel=KERNEL.split(":")[1],
        tensors=_operands(spec, first, out, paired=paired),
        integers={
            "N": n,
            "w_rows": experts.wide if first else spec.n,
            "capacity": capacity_of(spec, knobs),
            "k_blocks": ceil_div(spec.k if first else experts.inner, integer(own, "BLOCK_SIZE_K")),
            "programs": programs,
            "group_m": integer(own, "GROUP_SIZE_M"),
        },
        constants={
            **tile_sizes(own),
            "STAGES": own["num_stages"],
            **dict(zip(("REGISTERS", "LOADER_REGISTERS"), REGISTERS[1], strict=True)),
            "SCALE_BLOCK": SCALE_BLOCK,
            "SCALES": spec.w_scale.granularity if spec.w_scale else "none",
            "ROW_SCALES": _has_row_scales(spec, first),
            "ACTIVATION": experts.activation if first and knobs.get(FUSED) else "none",
            "GATED": gated,
            "TOP": TOP.get(spec.w_dtype, 1.0),
            "FEW": few,
        },
        grid=(programs, 1, 1),
        options={"launch_pdl": True, "num_warps": 4},
        boxes=_boxes(spec, own, gated=gated, few=few, paired=paired),
    )


def _has_row_scales(spec: GemmSpec, first: bool) -> bool:
    """Whether each row of the product is multiplied by a number of its own: its x's scale, its share, or both."""
    experts = experts_of(spec)
    return not by_block(spec) and (experts.quantised is not None or (first and experts.weight_first))


def _operands(spec: GemmSpec, first: bool, out: str, *, paired: bool) -> dict[str, str | None]:
    x, w = ("sorted", "w") if first else ("inner", "w2")
    return {
        "x": x,
        "w": w,
        "scales": f"{x}_scale" if by_block(spec) else x,
        "out": out,
        "w_scale_ptr": f"{w}_scale" if spec.w_scale else None,
        "row_scale_ptr": f"{x}_scale" if _has_row_scales(spec, first) else None,
        "out_scale_ptr": f"{out}_scale" if paired else None,
        "owners_ptr": "owners",
        "rows_ptr": "rows",
        "blocks_ptr": "blocks",
    }


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
