"""Launch of Hopper's warp-specialised kernels: knobs, builds, tensor descriptors and persistent grid."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from gemmpipe.core.data import Build, Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.family.dtypes import element_bytes
from gemmpipe.family.layouts import ROW_MAJOR, TILES_16X16, k_major_tiles
from gemmpipe.launch.launch import KernelImplementation, KernelLaunch
from gemmpipe.templates.constraints import workspace_violation
from gemmpipe.templates.hopper.constraints import (
    MAX_WORK_TILES,
    MAXNREG_TWO_CTAS,
    REGISTERS,
    SLOT_ROW_BYTES,
    WARPGROUP_M,
    MaxColumns,
    PersistentGrid,
    cluster_size,
    cluster_violation,
    ctas_per_sm,
    ctas_violation,
    epilogue_columns,
    has_halves,
    hopper_tile_violation,
    math_warpgroups,
    own_allocation,
    part_columns,
    split_k_mode,
    warpgroup_columns,
    x_box_rows,
)
from gemmpipe.templates.params import (
    CLUSTER_SIZE,
    CTAS_PER_SM,
    KERNEL_TYPE,
    TRITON_TYPES,
    WARP_SPECIALISED,
    WORKSPACE_PARAMETERS,
    int_knob,
    tile_constants,
)
from gemmpipe.templates.tiled import ceil_div, kernel_hash, space_facts, tile_counts

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space

_KNOBS = (
    KERNEL_TYPE,
    "BLOCK_SIZE_M",
    "BLOCK_SIZE_N",
    "BLOCK_SIZE_K",
    "GROUP_SIZE_M",
    "NUM_KSPLIT",
    "num_stages",
    CTAS_PER_SM,
    CLUSTER_SIZE,
)


@dataclass(frozen=True, kw_only=True)
class WarpSpecialised(KernelImplementation):
    """`gluon`: Hopper's TMA and warpgroup instructions; a family defines the kernel and its further arguments."""

    label = "gluon"
    kernel: str
    """`module:attribute` of the JIT function."""
    max_columns: MaxColumns
    """For a row-major weight; other layouts have no tiles of any multiple of 16 columns."""
    layout: str = ROW_MAJOR
    """The weight layout that it reads (see family/layouts.py)."""

    @abstractmethod
    def operands(self, spec: GemmSpec) -> Mapping[str, str]:
        """Names and Triton types of the pointers after the descriptors; `constexpr` for an absent one."""

    @abstractmethod
    def values(self, spec: GemmSpec, inputs: Inputs, prepared: Prepared) -> Mapping[str, object]:
        """The tensors of `operands`, the values of `sizes`, and the tensors of descriptors other than x, w and out."""

    def sizes(self, spec: GemmSpec) -> tuple[str, ...]:
        """Names of further integer arguments."""
        return ()

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Further constants."""
        return {}

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that this kernel has."""
        return _KNOBS

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's configs of this kernel type."""
        if KERNEL_TYPE not in space.axes:
            return ()
        return space.configs({**space_facts(spec, device), KERNEL_TYPE: WARP_SPECIALISED})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Its own knobs alone; GROUP_SIZE_M 1 for one row or column of tiles, and no empty split of K."""
        kept = {"NUM_KSPLIT": 1, **{name: knobs[name] for name in _KNOBS if name in knobs}}
        kept["NUM_KSPLIT"] = max(1, int_knob(kept, "NUM_KSPLIT"))
        for name in (CTAS_PER_SM, CLUSTER_SIZE):
            if kept.get(name) == 1:
                del kept[name]
        if min(tile_counts(spec, kept)) == 1:
            kept["GROUP_SIZE_M"] = 1
        blocks = ceil_div(spec.k, max(1, int_knob(kept, "BLOCK_SIZE_K")))
        share = ceil_div(blocks, min(blocks, int_knob(kept, "NUM_KSPLIT")))
        whole = PersistentGrid.of(spec, kept, device).whole
        kept["NUM_KSPLIT"] = ceil_div(blocks, share) if whole < prod(tile_counts(spec, kept)) else 1
        if split_k_mode(kept) == "cluster":
            kept[CLUSTER_SIZE] = kept["NUM_KSPLIT"]  # a cluster is the splits of one tile
        return kept

    def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        if spec.w_layout != self.layout or spec.batch != 1 or spec.experts is not None:
            return f"operands: this kernel reads one weight in the layout '{self.layout}'"
        if reason := hopper_tile_violation(
            spec, knobs, device, self.max_columns if self.layout == ROW_MAJOR else replace(self.max_columns, parts=0)
        ):
            return reason
        if reason := ctas_violation(knobs, device):
            return reason
        grid = PersistentGrid.of(spec, knobs, device)
        if reason := cluster_violation(knobs, grid):
            return reason
        if grid.work_tiles > MAX_WORK_TILES:
            return f"order: {grid.work_tiles} work tiles, at most {MAX_WORK_TILES} have exact coordinates"
        return workspace_violation(4 * grid.parts)

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` if a warpgroup's half of a tile is padding or a cluster's tiles share no columns, or None."""
        if knobs["BLOCK_SIZE_M"] != WARPGROUP_M and spec.m <= WARPGROUP_M:
            return f"tile beyond the problem: {knobs['BLOCK_SIZE_M']} rows for M={spec.m}"
        if CLUSTER_SIZE in knobs and split_k_mode(knobs) == "none" and knobs["GROUP_SIZE_M"] == 1:
            return f"{CLUSTER_SIZE}: neighbouring tiles share no columns of the weight"
        return None

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """One build for all sizes with tiles copied and added up in the same way; with halves for some M, two.

        A call may have another M than the row that it uses.
        """
        both = (False, True) if has_halves(knobs) else (False,)
        return tuple(self.build(spec, knobs, halved=halved) for halved in both)

    def registers(self, knobs: Knobs) -> tuple[int, int]:
        """Registers per thread of (a math warpgroup, the other warps)."""
        return REGISTERS[ctas_per_sm(knobs)]

    def build(self, spec: GemmSpec, knobs: Knobs, *, halved: bool) -> Build:
        """The build of these knobs; `halved`: for a last wave of half tiles."""
        operands = self.operands(spec)
        constants: dict[str, Scalar] = {name: None for name, kind in operands.items() if kind == "constexpr"}
        constants |= tile_constants(knobs)
        constants |= {
            "STAGES": knobs["num_stages"],
            "SPLIT_K": "halves" if halved else split_k_mode(knobs),
            **dict(zip(("REGISTERS", "LOADER_REGISTERS"), self.registers(knobs), strict=True)),
            **self.constants(spec, knobs),
        }
        signature: dict[str, str] = {
            name: f"tensordesc<{t}{box},{layout!r}>" for name, (t, box, layout) in self.boxes(spec, knobs).items()
        }
        pointers = {**operands, **WORKSPACE_PARAMETERS}
        signature |= {**pointers, **dict.fromkeys(self._integers(spec), "i32"), **dict.fromkeys(constants, "constexpr")}
        limit = () if ctas_per_sm(knobs) == 1 else (("maxnreg", MAXNREG_TWO_CTAS[math_warpgroups(knobs)]),)
        n, k, columns = int_knob(knobs, "BLOCK_SIZE_N"), int_knob(knobs, "BLOCK_SIZE_K"), warpgroup_columns(knobs)
        return Build(
            kernel=self.kernel,
            source_hash=kernel_hash(self.kernel),
            signature=tuple(signature.items()),
            constants=tuple(constants.items()),
            aligned=tuple(name for name, kind in pointers.items() if kind != "constexpr"),
            options=(("launch_pdl", True), *limit, ("num_warps", 4)),
            boxes=() if part_columns(knobs) == columns else (("w", (n, k)),),
        )

    def _integers(self, spec: GemmSpec) -> tuple[str, ...]:
        return ("M", "N", "blocks", "programs", "group_m", "whole", "splits", *self.sizes(spec))

    def kernel_name(self, knobs: Knobs) -> str:
        """The function and the hash of its source."""
        return f"{self.kernel.split(':')[1]}@{kernel_hash(self.kernel)[:8]}"

    def boxes(self, spec: GemmSpec, knobs: Knobs) -> dict[str, tuple[str, list[int], object]]:
        """(Triton type, box, shared-memory layout) of each tensor that TMA moves.

        A box with a number of columns that is no power of two is declared with a part's columns (see Build.boxes), with
        waves with the eight rows of a buffer (own_pace_memory.py).
        """
        from triton.experimental.gluon.language import NVMMASharedLayout

        bits = 8 * int(element_bytes(spec.x_dtype))
        m, n, k = (int_knob(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
        columns = epilogue_columns(knobs)
        ring = NVMMASharedLayout(swizzle_byte_width=SLOT_ROW_BYTES, element_bitwidth=bits, rank=2)
        stage = NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)
        columns_held = warpgroup_columns(knobs)
        width = part_columns(knobs)
        w_box, w_layout = [n if width == columns_held else width, k], ring
        if own_allocation(knobs):
            w_box = [8, k]
        if self.layout == TILES_16X16:  # runs of one tile each; each warpgroup's columns are a copy of their own
            w_box = [k // 16, columns_held // 16, 256]
            w_layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=3)
        return {
            "x": (TRITON_TYPES[spec.x_dtype], [x_box_rows(spec, m), k], ring),
            "w": (TRITON_TYPES[spec.w_dtype], w_box, w_layout),
            "out": (TRITON_TYPES[spec.out_dtype], [WARPGROUP_M, columns], stage),
        }

    def launch(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> KernelLaunch:
        """Persistent programs, CTAS_PER_SM per multiprocessor at most; descriptors are made here."""
        grid = PersistentGrid.of(spec, knobs, device)
        build = self.build(spec, knobs, halved=grid.halved)
        w = prepared.weights.w if self.layout == ROW_MAJOR else k_major_tiles(prepared.weights.w)
        arguments: dict[str, object] = {"x": inputs.x, "w": w, "out": out, "M": spec.m, "N": spec.n}
        arguments |= {"programs": grid.programs, "whole": grid.whole, "splits": grid.splits}
        arguments |= {"blocks": ceil_div(spec.k, int_knob(knobs, "BLOCK_SIZE_K")), "group_m": knobs["GROUP_SIZE_M"]}
        arguments |= self.values(spec, inputs, prepared)
        for name, (_, box, layout) in self.boxes(spec, knobs).items():
            arguments[name] = tensor_descriptor(arguments[name], box, layout)
        return KernelLaunch(
            build=build,
            grid=(grid.programs, 1, 1),
            cluster=cluster_size(knobs),
            launch_pdl=self.launch_pdl,
            arguments=arguments,
            parts=grid.parts,
            counters=2 * (grid.tiles - grid.whole) if grid.parts else 0,
        )


def tensor_descriptor(tensor: object, box: list[int], layout: object) -> object:
    """The TMA descriptor of a contiguous tensor for boxes of this shape with this shared-memory layout."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)  # type: ignore[attr-defined]
