"""The launches of a call over rows sorted by expert: places, gather, product, activation, product, sum.

`TmaLaunchStep` is a launch of a warp-specialised product with tensor descriptors (_grouped.py, _gathered.py,
_pingpong.py); the other steps are kernels of _order.py, _sorted.py and, where they also quantise x, _gathered.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gemmpipe.core.data import Build, Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.family.dtypes import FP8_MAX, element_bytes
from gemmpipe.family.moe import require_experts
from gemmpipe.kernels.fmoe._launch_plan import (
    COLUMNS_PER_PROGRAM,
    FP32,
    INT,
    ORDER_KERNELS,
    LaunchStep,
    max_blocks,
    order_scratch_shapes,
    order_steps,
    quantisation_groups,
    scales_per_row,
)
from gemmpipe.launch.workspace import TensorShape
from gemmpipe.templates.hopper.constraints import (
    REGISTERS,
    SLOT_ROW_BYTES,
    WARPGROUP_M,
    epilogue_columns,
    warpgroup_columns,
)
from gemmpipe.templates.hopper.launch import tensor_descriptor
from gemmpipe.templates.params import SCALE_BLOCK, TRITON_TYPES, int_knob, tile_constants
from gemmpipe.templates.tiled import (
    FUSED_ACT,
    FUSED_SUM,
    GATHER_ROWS,
    PINGPONG,
    ceil_div,
    kernel_hash,
    next_power_of_2,
    stage_knobs,
)

if TYPE_CHECKING:
    import torch


KERNEL = "gemmpipe.kernels.fmoe._grouped:grouped_warp_specialised"
SORT_MODULE = "gemmpipe.kernels.fmoe._sorted"
GATHERED_MODULE = "gemmpipe.kernels.fmoe._gathered"
GATHERED_KERNEL = f"{GATHERED_MODULE}:gathered_warp_specialised"
PINGPONG_KERNEL = "gemmpipe.kernels.fmoe._pingpong:pingpong_warp_specialised"
_LOADER_WARPS = 4
_BUSY_LOADER_REGISTERS = (232, 40)  # per thread of a math warpgroup, of a loader that gathers rows or looks ahead
# With up to so many scale groups of x a program takes half as many of them. For more the launch takes 27 us with whole
# programs and 30 with halves (DeepSeek-V3, 4096 tokens, H100, 2026-11-26).
_FEW_GROUPS = 2**15
_QUANTISING = {"order_pairs": "order_and_quantise", "rank_pairs": "rank_and_quantise"}
"""The first launch of the order of pairs, and the kernel with further programs that quantise x."""
KERNELS = (
    KERNEL,
    *ORDER_KERNELS,
    *(f"{SORT_MODULE}:{name}" for name in ("sorted_rows", "total_of_places")),
)
GATHERED_KERNELS = (
    *KERNELS,
    GATHERED_KERNEL,
    *(f"{GATHERED_MODULE}:{name}" for name in _QUANTISING.values()),
)
_UNGATHERED = ("x", "scales", "row_scale_ptr", "sources_ptr", "shares_ptr")
"""Operands of the product of rows at their places alone."""
_FEW_ROWS = 16  # rows per copy of a block that is mostly padding
_MAX_PDL_PAIRS = 256
Box = tuple[list[int], Any]
"""A TMA box: its sides, and its shared-memory layout."""


@dataclass(frozen=True, kw_only=True)
class TmaLaunchStep(LaunchStep):
    """One launch of the warp-specialised product; `sizes`: integers that a build may assume to be multiples of 16."""

    boxes: Mapping[str, Box]
    source: str = KERNEL
    sizes: tuple[str, ...] = ("K", "zeroed")

    def build(self, dtypes: Mapping[str, str]) -> Build:
        """Its build, for all numbers of rows with the same `mostly_padding_rows`."""
        absent: dict[str, Scalar] = {p: None for p, t in self.tensors.items() if t is None}
        constants = {**absent, **self.constants}
        signature: dict[str, str] = {}
        for parameter, tensor in self.tensors.items():
            kind = TRITON_TYPES.get(dtypes.get(tensor or "", ""), "i32")
            if parameter in self.boxes:
                box, layout = self.boxes[parameter]
                signature[parameter] = f"tensordesc<{kind}{box},{layout!r}>"
            else:
                signature[parameter] = f"*{kind}" if tensor else "constexpr"
        pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
        signature |= {**dict.fromkeys(self.integers, "i32"), **dict.fromkeys(self.constants, "constexpr")}
        return Build(
            kernel=self.source,
            source_hash=kernel_hash(self.source),
            signature=tuple(signature.items()),
            constants=tuple(constants.items()),
            aligned=(*pointers, *(name for name in self.sizes if self.integers.get(name, 1) % 16 == 0)),
            options=tuple(sorted(self.options.items())),
        )

    def arguments(self, tensors: "Mapping[str, torch.Tensor | None]") -> dict[str, object]:
        """As for other steps, with descriptors of the tensors as 2-D (experts' rows concatenated) or flat ones."""
        found = super().arguments(tensors)
        for name, (box, layout) in self.boxes.items():
            tensor: Any = found[name]
            found[name] = tensor_descriptor(
                tensor.reshape(-1, tensor.shape[-1]) if len(box) > 1 else tensor.reshape(-1), box, layout
            )
        return found


def mostly_padding_rows(spec: GemmSpec, block_m: int) -> bool:
    """True if blocks are mostly padding, which is then neither copied nor stored."""
    experts = require_experts(spec)
    return 2 * spec.m * experts.topk < block_m * min(experts.count, spec.m * experts.topk)


def quantises_in_epilogue(spec: GemmSpec, knobs: Knobs) -> bool:
    """True if the first product's kernel quantises h: a tile then has both sides of a whole group of its columns."""
    return bool(knobs.get(FUSED_ACT)) and require_experts(spec).gated and has_block_scales(spec)


def unsplit_knobs(knobs: Knobs, stage: int) -> dict[str, Scalar]:
    """A stage's knobs for the constraints of Hopper's kernels: without split-K."""
    return {**stage_knobs(knobs, stage), "NUM_KSPLIT": 1}


def has_block_scales(spec: GemmSpec) -> bool:
    """True if scales vary along K."""
    return spec.w_scale is not None and spec.w_scale.granularity == "block"


def row_capacity(spec: GemmSpec, knobs: Knobs) -> int:
    """Places for rows, in whole blocks."""
    block_m = int_knob(knobs, "BLOCK_SIZE_M")
    return max_blocks(spec, block_m) * block_m


def output_columns(spec: GemmSpec, knobs: Knobs, stage: int) -> int:
    """Columns of the first or the second product as it is stored."""
    experts = require_experts(spec)
    return spec.n if stage == 2 else experts.inner if _joins_gate_and_up(spec, knobs, stage) else experts.w1_rows


def max_tiles(spec: GemmSpec, knobs: Knobs, stage: int) -> int:
    """The most tiles of the first or the second product for any routing."""
    own = unsplit_knobs(knobs, stage)
    width = int_knob(own, "BLOCK_SIZE_N") // (2 if _joins_gate_and_up(spec, knobs, stage) else 1)
    return max_blocks(spec, int_knob(own, "BLOCK_SIZE_M")) * ceil_div(output_columns(spec, knobs, stage), width)


def _joins_gate_and_up(spec: GemmSpec, knobs: Knobs, stage: int) -> bool:
    """True if a tile has columns of the gate and of the up projection, which it combines."""
    return stage == 1 and bool(knobs.get(FUSED_ACT)) and require_experts(spec).gated


def grouped_product_step(spec: GemmSpec, knobs: Knobs, device: Device, stage: int, out: str) -> TmaLaunchStep:
    """The first or the second product, into the tensor `out`; the first one zeroes the output of a second that adds."""
    experts, own, first = require_experts(spec), unsplit_knobs(knobs, stage), stage == 1
    gated, paired = _joins_gate_and_up(spec, knobs, stage), first and quantises_in_epilogue(spec, knobs)
    zeroed = "out" if first and knobs.get(FUSED_SUM) else None
    n = output_columns(spec, knobs, stage)
    few = mostly_padding_rows(spec, int_knob(own, "BLOCK_SIZE_M"))
    programs = min(device.cu_num, max_tiles(spec, knobs, stage))
    return TmaLaunchStep(
        kernel=KERNEL.split(":")[1],
        tensors=_operands(spec, first, out, paired=paired, zeroed=zeroed),
        integers={
            "N": n,
            "w_rows": experts.w1_rows if first else spec.n,
            "capacity": row_capacity(spec, knobs),
            "k_blocks": ceil_div(spec.k if first else experts.inner, int_knob(own, "BLOCK_SIZE_K")),
            "programs": programs,
            "group_m": int_knob(own, "GROUP_SIZE_M"),
            "zeroed": spec.m * spec.n if zeroed else 0,
        },
        constants={
            **tile_constants(own),
            "STAGES": own["num_stages"],
            **dict(zip(("REGISTERS", "LOADER_REGISTERS"), REGISTERS[1], strict=True)),
            "SCALE_BLOCK": SCALE_BLOCK,
            "SCALES": spec.w_scale.granularity if spec.w_scale else "none",
            "ROW_SCALES": _has_row_scales(spec, first),
            "ACTIVATION": experts.activation if first and knobs.get(FUSED_ACT) else "none",
            "GATED": gated,
            "TOP": FP8_MAX.get(spec.w_dtype, 1.0),
            "FEW": few,
            "TOPK": 0,
            "STAGED": 0,
        },
        grid=(programs, 1, 1),
        options={"launch_pdl": True, "num_warps": 4},
        boxes=_boxes(spec, own, gated=gated, few=few, paired=paired),
    )


def second_product_step(spec: GemmSpec, knobs: Knobs, device: Device) -> TmaLaunchStep:
    """The second product, stored as parts or, with FUSED_SUM, added to the output.

    By warpgroups that share a tile or, with PINGPONG, have tiles of their own.
    """
    step = grouped_product_step(spec, knobs, device, 2, "parts")
    if knobs.get(PINGPONG):
        step = _pingpong_step(step, unsplit_knobs(knobs, 2))
    return _adding_step(spec, step, unsplit_knobs(knobs, 2)) if knobs.get(FUSED_SUM) else step


def _adding_step(spec: GemmSpec, step: TmaLaunchStep, own: Knobs) -> TmaLaunchStep:
    """The second product that adds its rows to the output."""
    experts = require_experts(spec)
    pairs = {"sources_ptr": "sources", "shares_ptr": None if experts.weight_first else "shares"}
    columns = int_knob(own, "BLOCK_SIZE_N") if step.source == PINGPONG_KERNEL else epilogue_columns(own)
    return replace(
        step,
        tensors={**step.tensors, **pairs, "out": "out"},
        constants={**step.constants, "TOPK": experts.topk, "STAGED": columns},
        boxes={name: box for name, box in step.boxes.items() if name != "out"},
        sizes=("N",),
    )


def _pingpong_step(step: TmaLaunchStep, own: Knobs) -> TmaLaunchStep:
    """The second product by warpgroups with tiles of their own."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    n, k = int_knob(own, "BLOCK_SIZE_N"), int_knob(own, "BLOCK_SIZE_K")
    boxes = {**step.boxes, "w": ([n, k], step.boxes["w"][1])}
    if "out" in boxes:
        layout = NVMMASharedLayout(swizzle_byte_width=min(128, 2 * n), element_bitwidth=16, rank=2)
        boxes["out"] = ([WARPGROUP_M, n], layout)
    registers = dict(zip(("REGISTERS", "LOADER_REGISTERS"), _BUSY_LOADER_REGISTERS, strict=True))
    return replace(
        step,
        kernel=PINGPONG_KERNEL.split(":")[1],
        source=PINGPONG_KERNEL,
        constants={**step.constants, **registers},
        boxes=boxes,
    )


def gathered_product_step(spec: GemmSpec, knobs: Knobs, device: Device, out: str) -> TmaLaunchStep:
    """The first product, with x's rows gathered by the loader, into the tensor `out`."""
    step = grouped_product_step(spec, knobs, device, 1, out)
    scaled = has_block_scales(spec)
    tensors = {
        "x_ptr": "q" if scaled else "x",
        "x_scale_ptr": "q_scale" if scaled else None,
        "sources_ptr": "sources",
        **{name: tensor for name, tensor in step.tensors.items() if name not in _UNGATHERED},
    }
    registers = dict(zip(("REGISTERS", "LOADER_REGISTERS"), _BUSY_LOADER_REGISTERS, strict=True))
    constants = {name: value for name, value in step.constants.items() if name not in ("ROW_SCALES", "STAGED")}
    return replace(
        step,
        kernel=GATHERED_KERNEL.split(":")[1],
        source=GATHERED_KERNEL,
        tensors=tensors,
        integers={"N": step.integers["N"], "K": spec.k, **step.integers},
        constants={**constants, **registers, "TOPK": require_experts(spec).topk, "WARPS": _LOADER_WARPS},
        boxes={name: box for name, box in step.boxes.items() if name in ("w", "out")},
    )


def _with_quantiser(spec: GemmSpec, step: LaunchStep, interpreted: bool) -> LaunchStep:
    """The first launch of the order of pairs, with further programs that quantise x."""
    experts, (chunks, _, _) = require_experts(spec), step.grid
    group, _ = quantisation_groups(experts.quantised, spec.k)
    groups, warps = spec.m * spec.k // group, int(str(step.options["num_warps"]))
    per_program = 2 * warps if groups <= _FEW_GROUPS else 4 * warps
    return replace(
        step,
        kernel=_QUANTISING[step.kernel],
        module=GATHERED_MODULE,
        tensors={**step.tensors, "x_ptr": "x", "out_ptr": "q", "scale_ptr": "q_scale"},
        integers={**step.integers, "chunks": chunks, "groups": groups},
        constants={
            **step.constants,
            "GROUPS": per_program,
            "GROUP": group,
            "TOP": FP8_MAX[spec.w_dtype],
            "INTERPRETED": interpreted,
        },
        grid=(chunks + ceil_div(groups, per_program), 1, 1),
    )


def _has_row_scales(spec: GemmSpec, first: bool) -> bool:
    """True if each row of the product is multiplied by a scale of its own: that of x, the pair's share, or both."""
    experts = require_experts(spec)
    return not has_block_scales(spec) and (experts.quantised is not None or (first and experts.weight_first))


def _operands(spec: GemmSpec, first: bool, out: str, *, paired: bool, zeroed: str | None) -> dict[str, str | None]:
    x, w = ("sorted", "w") if first else ("inner", "w2")
    return {
        "x": x,
        "w": w,
        "scales": f"{x}_scale" if has_block_scales(spec) else x,
        "out": out,
        "w_scale_ptr": f"{w}_scale" if spec.w_scale else None,
        "row_scale_ptr": f"{x}_scale" if _has_row_scales(spec, first) else None,
        "out_scale_ptr": f"{out}_scale" if paired else None,
        "sources_ptr": None,
        "shares_ptr": None,
        "zeroed_ptr": zeroed,
        "owners_ptr": "owners",
        "rows_ptr": "rows",
        "blocks_ptr": "blocks",
    }


def _boxes(spec: GemmSpec, own: Knobs, *, gated: bool, few: bool, paired: bool) -> dict[str, Box]:
    from triton.experimental.gluon.language import NVMMASharedLayout

    bits = 8 * int(element_bytes(spec.w_dtype))
    m, n, k = (int_knob(own, f"BLOCK_SIZE_{axis}") for axis in "MNK")
    columns, out_bits = warpgroup_columns(own) // 2 if gated else epilogue_columns(own), bits if paired else 16
    ring = NVMMASharedLayout(swizzle_byte_width=SLOT_ROW_BYTES, element_bitwidth=bits, rank=2)
    # A warpgroup's columns are of one side, or half of them of each.
    side_columns = warpgroup_columns(own) if paired else warpgroup_columns(own) // 2
    x: Box = ([_FEW_ROWS if few else m, k], ring)
    found = {"x": x, "w": ([side_columns if gated else n, k], ring), "scales": x}
    if has_block_scales(spec):
        flat = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
        found["scales"] = ([m], flat)
    if not few:
        row_bytes = min(128, columns * out_bits // 8)
        found["out"] = (
            [WARPGROUP_M, columns],
            NVMMASharedLayout(swizzle_byte_width=row_bytes, element_bitwidth=out_bits, rank=2),
        )
    return found


def grouped_scratch_shapes(spec: GemmSpec, knobs: Knobs) -> dict[str, TensorShape]:
    """(shape, dtype) of the tensors between the launches, by name."""
    experts, capacity = require_experts(spec), row_capacity(spec, knobs)
    found: dict[str, TensorShape] = {
        "places": ((spec.m * experts.topk,), INT),
        "rows": ((max_blocks(spec, int_knob(knobs, "BLOCK_SIZE_M")),), INT),
        **order_scratch_shapes(spec, int_knob(knobs, "BLOCK_SIZE_M")),
        **_x_shapes(spec, knobs, capacity),
        "inner": ((capacity, experts.inner), spec.w_dtype),
    }
    if not knobs.get(FUSED_SUM):
        found["parts"] = ((capacity, spec.n), spec.out_dtype)
    elif not knobs.get(GATHER_ROWS):
        found["sources"] = ((capacity,), INT)
    if not knobs.get(FUSED_ACT):
        found["wide"] = ((capacity, experts.w1_rows), spec.x_dtype)
    elif experts.quantised and not quantises_in_epilogue(spec, knobs):
        found["wide"] = ((capacity, experts.inner), spec.x_dtype)
    if experts.quantised:
        found["inner_scale"] = ((scales_per_row(experts.quantised, experts.inner), capacity), FP32)
    return found


def _x_shapes(spec: GemmSpec, knobs: Knobs, capacity: int) -> dict[str, TensorShape]:
    """The rows of x at their places with their scales; or quantised, if they are, and which pair each place has."""
    experts = require_experts(spec)
    groups = scales_per_row(experts.quantised, spec.k) if experts.quantised else 1
    if knobs.get(GATHER_ROWS):
        quantised: dict[str, TensorShape] = {"q": ((spec.m, spec.k), spec.w_dtype), "q_scale": ((spec.m, groups), FP32)}
        return {"sources": ((capacity,), INT), **(quantised if experts.quantised else {})}
    scales: dict[str, TensorShape] = {"sorted_scale": ((groups, capacity), FP32)}
    found: dict[str, TensorShape] = {"sorted": ((capacity, spec.k), spec.w_dtype)}
    return found | (scales if experts.quantised or experts.weight_first else {})


def grouped_launch_steps(spec: GemmSpec, knobs: Knobs, device: Device, *, interpreted: bool) -> tuple[LaunchStep, ...]:
    """The launches in their order; `interpreted`: for Triton's interpreter, with bf16 and fp8 corrected."""
    experts, fused = require_experts(spec), bool(knobs.get(FUSED_ACT))
    found = _order_steps(spec, knobs, device, interpreted)
    wide = "inner" if quantises_in_epilogue(spec, knobs) or (fused and not experts.quantised) else "wide"
    if knobs.get(GATHER_ROWS):
        if experts.quantised:
            found[0] = _with_quantiser(spec, found[0], interpreted)
        found.append(gathered_product_step(spec, knobs, device, wide))
    else:
        found += [_gather_step(spec, knobs, interpreted), grouped_product_step(spec, knobs, device, 1, wide)]
    if wide == "wide":
        found.append(_activate_step(spec, knobs, interpreted))
    found.append(second_product_step(spec, knobs, device))
    if knobs.get(FUSED_SUM):
        return tuple(found)
    return (*found, _total_step(spec, interpreted))


def _order_steps(spec: GemmSpec, knobs: Knobs, device: Device, interpreted: bool) -> list[LaunchStep]:
    """Finds the places of pairs among rows ordered by expert."""
    results = {"places_ptr": "places", "pairs_ptr": None, "rows_ptr": "rows"}
    if knobs.get(GATHER_ROWS) or knobs.get(FUSED_SUM):
        results["sources_ptr"] = "sources"
    steps = order_steps(spec, knobs, results, device.vendor, overlap=not interpreted)
    return [replace(step, options={**step.options, **_pdl_option(spec)}) for step in steps]


def _gather_step(spec: GemmSpec, knobs: Knobs, interpreted: bool) -> LaunchStep:
    """Copies x's rows to their places, quantised."""
    experts = require_experts(spec)
    own: dict[str, Scalar] = {"TOPK": experts.topk, "SORTED": False, "ACTIVATION": "none", "GATED": False}
    shares = "shares" if experts.weight_first else None
    return _sorted_rows_step(spec, knobs, ("x", "sorted", shares), spec.m, spec.k, own, interpreted)


def _activate_step(spec: GemmSpec, knobs: Knobs, interpreted: bool) -> LaunchStep:
    """Computes h from the first product in `wide`."""
    experts = require_experts(spec)
    unfused = not knobs.get(FUSED_ACT)
    own: dict[str, Scalar] = {
        "TOPK": 1,
        "SORTED": True,
        "ACTIVATION": experts.activation if unfused else "none",
        "GATED": unfused and experts.gated,
    }
    return _sorted_rows_step(
        spec, knobs, ("wide", "inner", None), spec.m * experts.topk, experts.inner, own, interpreted
    )


def _sorted_rows_step(
    spec: GemmSpec,
    knobs: Knobs,
    names: tuple[str, str, str | None],
    rows: int,
    columns: int,
    own: Mapping[str, Scalar],
    interpreted: bool,
) -> LaunchStep:
    """`names`: the tensors that are read and written, and the shares that the written scales are multiplied by."""
    quantised = require_experts(spec).quantised
    x, out, shares = names
    group, groups = quantisation_groups(quantised, columns)
    return LaunchStep(
        kernel="sorted_rows",
        module=SORT_MODULE,
        tensors={
            "x_ptr": x,
            "out_ptr": out,
            "scale_ptr": f"{out}_scale" if quantised or shares else None,
            "shares_ptr": shares,
            "places_ptr": "places",
        },
        integers={"columns": columns, "capacity": row_capacity(spec, knobs)},
        constants={
            **own,
            "QUANTISED": quantised is not None,
            "GROUPS": groups,
            "GROUP": group,
            "TOP": FP8_MAX.get(spec.w_dtype, 1.0),
            "INTERPRETED": interpreted,
        },
        grid=(rows, ceil_div(columns, groups * group), 1),
        options=_pdl_options(spec, min(8, max(1, groups * group // 256))),
    )


def _total_step(spec: GemmSpec, interpreted: bool) -> LaunchStep:
    experts, block = require_experts(spec), min(COLUMNS_PER_PROGRAM, next_power_of_2(spec.n))
    return LaunchStep(
        kernel="total_of_places",
        module=SORT_MODULE,
        tensors={
            "parts_ptr": "parts",
            "shares_ptr": None if experts.weight_first else "shares",
            "places_ptr": "places",
            "out_ptr": "out",
        },
        integers={"N": spec.n},
        constants={"TOPK": experts.topk, "BLOCK": block, "INTERPRETED": interpreted},
        grid=(spec.m, ceil_div(spec.n, block), 1),
        options=_pdl_options(spec, 4),
    )


def _pdl_options(spec: GemmSpec, warps: int) -> dict[str, Scalar]:
    """Options of a launch that overlaps the previous one where calls have few pairs."""
    return {**_pdl_option(spec), "num_warps": warps}


def _pdl_option(spec: GemmSpec) -> dict[str, Scalar]:
    """Options of a launch; with few pairs it may overlap the previous one (see _sorted.gdc_wait_and_launch).

    Qwen3-30B's experts on an H200 (2026-11-21): at 1 token 28.8 us in all, 29.4 without overlap; but at 1024 tokens 231
    and 227, at 4096 535 and 531.
    """
    return {"launch_pdl": True} if spec.m * require_experts(spec).topk <= _MAX_PDL_PAIRS else {}
