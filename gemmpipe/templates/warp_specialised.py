"""Launching Hopper's warp-specialised kernels: their knobs, descriptors and persistent grid."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from gemmpipe.data import Build, Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.launching.launches import Kernel, KernelLaunch
from gemmpipe.layouts import PLAIN, TILES_16X16, runs_along_k
from gemmpipe.operand_types import element_bytes
from gemmpipe.templates.axes import CLUSTER, CTAS, KIND, integer
from gemmpipe.templates.fits import too_many_parts
from gemmpipe.templates.signature import PARTS, TYPES, tile_sizes
from gemmpipe.templates.tiled import ceil_div, facts_of, hash_of, tiles_of
from gemmpipe.templates.warp_specialised_fits import crowded, scattered, tile_misfit
from gemmpipe.templates.warp_specialised_tiles import (
    GROUP_ROWS,
    LEAST_REGISTERS,
    MOST_PIECES,
    REGISTERS,
    ROW_BYTES,
    Grid,
    Widest,
    cluster_of,
    columns_of,
    copied_rows,
    ctas_of,
    part_width,
    staged_columns,
    summed_by,
)

if TYPE_CHECKING:
    import torch

    from gemmpipe.space import Space

WARP_SPECIALISED = "warp_specialised"
_KNOBS = (
    KIND,
    "BLOCK_SIZE_M",
    "BLOCK_SIZE_N",
    "BLOCK_SIZE_K",
    "GROUP_SIZE_M",
    "NUM_KSPLIT",
    "num_stages",
    CTAS,
    CLUSTER,
)


@dataclass(frozen=True, kw_only=True)
class WarpSpecialised(Kernel):
    """`gluon`: Hopper's copy engine and warpgroups; a family says which kernel, which further arguments, what fits."""

    label = "gluon"
    kernel: str
    """`module:attribute` of the JIT function."""
    widest: Widest
    """Of a plain weight; any multiple of 16 columns in no other layout."""
    layout: str = PLAIN
    """The weight's that it reads (see layouts)."""

    @abstractmethod
    def operands(self, spec: GemmSpec) -> Mapping[str, str]:
        """Names and Triton types of the pointers beside w, after the descriptors; `constexpr` for an absent one."""

    @abstractmethod
    def values(self, spec: GemmSpec, inputs: Inputs, prepared: Prepared) -> Mapping[str, object]:
        """The tensors of `operands`, what `sizes` names, and the tensors of descriptors beside x, w and out."""

    def sizes(self, spec: GemmSpec) -> tuple[str, ...]:
        """Names of further integer arguments."""
        return ()

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Further constants."""
        return {}

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that it knows."""
        return _KNOBS

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's points of this kernel type."""
        if KIND not in space.axes:
            return ()
        return space.points({**facts_of(spec, device), KIND: WARP_SPECIALISED})

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Its own knobs alone; one row or column of tiles has one order, and no split of K is empty."""
        kept = {"NUM_KSPLIT": 1, **{name: knobs[name] for name in _KNOBS if name in knobs}}
        kept["NUM_KSPLIT"] = max(1, integer(kept, "NUM_KSPLIT"))
        for name in (CTAS, CLUSTER):
            if kept.get(name) == 1:
                del kept[name]
        if min(tiles_of(spec, kept)) == 1:
            kept["GROUP_SIZE_M"] = 1
        blocks = ceil_div(spec.k, max(1, integer(kept, "BLOCK_SIZE_K")))
        share = ceil_div(blocks, min(blocks, integer(kept, "NUM_KSPLIT")))
        whole = Grid.of(spec, kept, device).whole
        kept["NUM_KSPLIT"] = ceil_div(blocks, share) if whole < prod(tiles_of(spec, kept)) else 1
        if summed_by(kept) == "cluster":
            kept[CLUSTER] = kept["NUM_KSPLIT"]  # it is the splits that meet
        return kept

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        if spec.w_layout != self.layout or spec.batch != 1 or spec.experts is not None:
            return f"operands: this kernel reads one weight in the layout '{self.layout}'"
        if reason := tile_misfit(
            spec, knobs, device, self.widest if self.layout == PLAIN else replace(self.widest, parts=0)
        ):
            return reason
        if reason := crowded(knobs, device):
            return reason
        grid = Grid.of(spec, knobs, device)
        if reason := scattered(knobs, grid):
            return reason
        if grid.pieces > MOST_PIECES:
            return f"order: {grid.pieces} pieces of work, {MOST_PIECES} are told apart"
        return too_many_parts(4 * grid.parts)

    def wasteful(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """A tile of which one warpgroup's half is padding; a cluster of tiles that share no columns of the weight."""
        if knobs["BLOCK_SIZE_M"] != GROUP_ROWS and spec.m <= GROUP_ROWS:
            return f"tile beyond the problem: {knobs['BLOCK_SIZE_M']} rows for M={spec.m}"
        if CLUSTER in knobs and summed_by(knobs) == "none" and knobs["GROUP_SIZE_M"] == 1:
            return f"{CLUSTER}: neighbours that share no columns of the weight"
        return None

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """One build for all sizes whose tiles are copied and added up in the same way."""
        return (self.build(spec, knobs),)

    def registers(self, knobs: Knobs) -> tuple[int, int]:
        """A thread's of a math warpgroup and of the other warps."""
        return REGISTERS[ctas_of(knobs)]

    def build(self, spec: GemmSpec, knobs: Knobs) -> Build:
        """What its launches need to be compiled."""
        operands = self.operands(spec)
        constants: dict[str, Scalar] = {name: None for name, kind in operands.items() if kind == "constexpr"}
        constants |= tile_sizes(knobs)
        constants |= {
            "STAGES": knobs["num_stages"],
            "SPLIT_K": summed_by(knobs),
            **dict(zip(("REGISTERS", "LOADER_REGISTERS"), self.registers(knobs), strict=True)),
            **self.constants(spec, knobs),
        }
        signature: dict[str, str] = {
            name: f"tensordesc<{t}{box},{layout!r}>" for name, (t, box, layout) in self.boxes(spec, knobs).items()
        }
        pointers = {**operands, **PARTS}
        signature |= {**pointers, **dict.fromkeys(self._integers(spec), "i32"), **dict.fromkeys(constants, "constexpr")}
        limit = () if ctas_of(knobs) == 1 else (("maxnreg", LEAST_REGISTERS),)
        n, k, columns = integer(knobs, "BLOCK_SIZE_N"), integer(knobs, "BLOCK_SIZE_K"), columns_of(knobs)
        return Build(
            kernel=self.kernel,
            source_hash=hash_of(self.kernel),
            signature=tuple(signature.items()),
            constants=tuple(constants.items()),
            aligned=tuple(name for name, kind in pointers.items() if kind != "constexpr"),
            options=(("launch_pdl", True), *limit, ("num_warps", 4)),
            boxes=() if part_width(columns) == columns else (("w", (n, k)),),
        )

    def _integers(self, spec: GemmSpec) -> tuple[str, ...]:
        return ("M", "N", "blocks", "programs", "group_m", "whole", "splits", *self.sizes(spec))

    def kernel_name(self, knobs: Knobs) -> str:
        """The function and the hash of its source."""
        return f"{self.kernel.split(':')[1]}@{hash_of(self.kernel)[:8]}"

    def boxes(self, spec: GemmSpec, knobs: Knobs) -> dict[str, tuple[str, list[int], object]]:
        """Triton type, box and shared-memory layout of each tensor that the copy engine moves.

        A box of no power of two is declared by a part's columns (see Build.boxes).
        """
        from triton.experimental.gluon.language import NVMMASharedLayout

        bits = 8 * int(element_bytes(spec.x_dtype))
        m, n, k = (integer(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
        columns = staged_columns(knobs)
        ring = NVMMASharedLayout(swizzle_byte_width=ROW_BYTES, element_bitwidth=bits, rank=2)
        stage = NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)
        columns_held = columns_of(knobs)
        w_box, w_place = [n if part_width(columns_held) == columns_held else part_width(columns_held), k], ring
        if self.layout == TILES_16X16:  # runs of a tile each; a warpgroup's columns are copied by themselves
            w_box = [k // 16, columns_of(knobs) // 16, 256]
            w_place = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=3)
        return {
            "x": (TYPES[spec.x_dtype], [copied_rows(spec, m), k], ring),
            "w": (TYPES[spec.w_dtype], w_box, w_place),
            "out": (TYPES[spec.out_dtype], [GROUP_ROWS, columns], stage),
        }

    def launch(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> KernelLaunch:
        """Persistent programs, CTAS_PER_SM a multiprocessor at most; descriptors are made here."""
        build = self.build(spec, knobs)
        grid = Grid.of(spec, knobs, device)
        w = prepared.weights.w if self.layout == PLAIN else runs_along_k(prepared.weights.w)
        arguments: dict[str, object] = {"x": inputs.x, "w": w, "out": out, "M": spec.m, "N": spec.n}
        arguments |= {"programs": grid.programs, "whole": grid.whole, "splits": integer(knobs, "NUM_KSPLIT")}
        arguments |= {"blocks": ceil_div(spec.k, integer(knobs, "BLOCK_SIZE_K")), "group_m": knobs["GROUP_SIZE_M"]}
        arguments |= self.values(spec, inputs, prepared)
        for name, (_, box, layout) in self.boxes(spec, knobs).items():
            arguments[name] = descriptor(arguments[name], box, layout)
        return KernelLaunch(
            build=build,
            grid=(grid.programs, 1, 1),
            cluster=cluster_of(knobs),
            arguments=arguments,
            parts=grid.parts,
            counters=2 * (grid.tiles - grid.whole) if grid.parts else 0,
        )


def descriptor(tensor: object, box: list[int], layout: object) -> object:
    """What the copy engine needs to know of a contiguous tensor: boxes of it, and how they lie in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)  # type: ignore[attr-defined]
