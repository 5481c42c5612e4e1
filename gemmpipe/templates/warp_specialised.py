"""Launching Hopper's warp-specialised kernels: their knobs, descriptors, persistent grid, and what fits."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from gemmpipe.data import Build, Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.launching.launches import Kernel, KernelLaunch
from gemmpipe.layouts import PLAIN, TILES_16X16, runs_along_k
from gemmpipe.operand_types import element_bytes
from gemmpipe.templates.axes import CLUSTER, CTAS, PORTABLE_CLUSTER, integer
from gemmpipe.templates.signature import PARTS, TYPES, tile_sizes
from gemmpipe.templates.tiled import ceil_div, facts_of, hash_of
from gemmpipe.templates.warp_specialised_tiles import (
    GROUP_ROWS,
    LEAST_REGISTERS,
    MOST_PIECES,
    REGISTERS,
    ROW_BYTES,
    Grid,
    cluster_of,
    columns_of,
    copied_rows,
    ctas_of,
    shared_bytes,
    staged_columns,
    summed_by,
    tiles_of,
)

if TYPE_CHECKING:
    import torch

    from gemmpipe.space import Space

KIND = "warp_specialised"
_KNOBS = (
    "kernel_type",
    "BLOCK_SIZE_M",
    "BLOCK_SIZE_N",
    "BLOCK_SIZE_K",
    "GROUP_SIZE_M",
    "NUM_KSPLIT",
    "num_stages",
    CTAS,
    CLUSTER,
)
_WORKSPACE_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class WarpSpecialised(Kernel):
    """`gluon`: Hopper's copy engine and warpgroups; a family says which kernel, which further arguments, what fits."""

    label = "gluon"
    kernel: str
    """`module:attribute` of the JIT function."""
    held: int
    """fp32 tiles that a math warpgroup has in registers at once."""
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

    def constants(self, spec: GemmSpec) -> Mapping[str, Scalar]:
        """Further constants."""
        return {}

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that it knows."""
        return _KNOBS

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's points of this kernel type."""
        if "kernel_type" not in space.axes:
            return ()
        return space.points({**facts_of(spec, device), "kernel_type": KIND})

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
        if reason := tile_misfit(spec, knobs, device, held=self.held):
            return reason
        if reason := _crowded(knobs, device):
            return reason
        grid = Grid.of(spec, knobs, device)
        if reason := _scattered(knobs, grid):
            return reason
        if grid.pieces > MOST_PIECES:
            return f"order: {grid.pieces} pieces of work, {MOST_PIECES} are told apart"
        if 4 * grid.parts > _WORKSPACE_BYTES:
            return f"workspace: {grid.parts} elements of split-K parts"
        return None

    def wasteful(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """A tile of which one warpgroup's half is padding."""
        if knobs["BLOCK_SIZE_M"] != GROUP_ROWS and spec.m <= GROUP_ROWS:
            return f"tile beyond the problem: {knobs['BLOCK_SIZE_M']} rows for M={spec.m}"
        if CLUSTER in knobs and summed_by(knobs) == "none" and knobs["GROUP_SIZE_M"] == 1:
            return f"{CLUSTER}: neighbours that share no columns of the weight"
        return None

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """One build for every size and number of splits."""
        operands = self.operands(spec)
        constants: dict[str, Scalar] = {name: None for name, kind in operands.items() if kind == "constexpr"}
        constants |= tile_sizes(knobs)
        constants |= {
            "STAGES": knobs["num_stages"],
            "SPLIT_K": summed_by(knobs),
            **dict(zip(("REGISTERS", "LOADER_REGISTERS"), REGISTERS[ctas_of(knobs)], strict=True)),
            **self.constants(spec),
        }
        signature: dict[str, str] = {
            name: f"tensordesc<{t}{box},{layout!r}>" for name, (t, box, layout) in self.boxes(spec, knobs).items()
        }
        pointers = {**operands, **PARTS}
        signature |= {**pointers, **dict.fromkeys(self._integers(spec), "i32"), **dict.fromkeys(constants, "constexpr")}
        limit = () if ctas_of(knobs) == 1 else (("maxnreg", LEAST_REGISTERS),)
        build = Build(
            kernel=self.kernel,
            source_hash=hash_of(self.kernel),
            signature=tuple(signature.items()),
            constants=tuple(constants.items()),
            aligned=tuple(name for name, kind in pointers.items() if kind != "constexpr"),
            options=(("launch_pdl", True), *limit, ("num_warps", 4)),
        )
        return (build,)

    def _integers(self, spec: GemmSpec) -> tuple[str, ...]:
        return ("M", "N", "blocks", "programs", "group_m", "whole", "splits", *self.sizes(spec))

    def kernel_name(self, knobs: Knobs) -> str:
        """The function and the hash of its source."""
        return f"{self.kernel.split(':')[1]}@{hash_of(self.kernel)[:8]}"

    def boxes(self, spec: GemmSpec, knobs: Knobs) -> dict[str, tuple[str, list[int], object]]:
        """Triton type, box and shared-memory layout of each tensor that the copy engine moves."""
        from triton.experimental.gluon.language import NVMMASharedLayout

        bits = 8 * int(element_bytes(spec.x_dtype))
        m, n, k = (integer(knobs, f"BLOCK_SIZE_{axis}") for axis in "MNK")
        columns = staged_columns(knobs)
        ring = NVMMASharedLayout(swizzle_byte_width=ROW_BYTES, element_bitwidth=bits, rank=2)
        stage = NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)
        w_box, w_place = [n, k], ring
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
        """A persistent program a multiprocessor at most; descriptors are made here."""
        (build,) = self.builds(spec, knobs, device)
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


def tile_misfit(spec: GemmSpec, knobs: Knobs, device: Device, *, held: int) -> str | None:
    """The first rule that a product of these sizes breaks on the ring and the registers, whatever its weight's layout.

    `held` as WarpSpecialised says it.
    """
    m, n, stages = (integer(knobs, name) for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_stages"))
    size = int(element_bytes(spec.x_dtype))
    if device.kind == "cpu":
        return "no GPU: Triton compiles for GPUs"
    if device.gfx != "sm_90":
        return f"architecture: warpgroup instructions are sm_90's, this is {device.gfx}"
    if spec.out_dtype not in ("bfloat16", "float16"):
        return f"output: {spec.out_dtype} does not fit beside the ring"
    # A descriptor's rows begin at multiples of 16 bytes.
    if spec.n % 8 or spec.k * size % 16:
        return f"alignment: N={spec.n} K={spec.k}, the copy engine's rows begin at multiples of 16 bytes"
    if m not in (GROUP_ROWS, 2 * GROUP_ROWS) or integer(knobs, "BLOCK_SIZE_K") * size != ROW_BYTES:
        return f"tile: {m} rows, BLOCK_SIZE_K={knobs['BLOCK_SIZE_K']}; two warpgroups share 64 or 128 of 128 bytes"
    # Triton has no warpgroup instruction of int8 with 256 columns (3.6 and 3.9).
    most = 256 if held == 1 and spec.x_dtype != "int8" else 128
    if not 16 <= columns_of(knobs) <= most or n & (n - 1) or n > 256:
        return f"registers: {columns_of(knobs)} columns a warpgroup of a {m}x{n} tile, 16 to {most} are held"
    needed = shared_bytes(knobs)
    if stages < 2 or needed > device.shared_bytes:
        return f"shared memory: about {needed} bytes for {stages} stages, {device.shared_bytes} a block"
    return None


def _crowded(knobs: Knobs, device: Device) -> str | None:
    """Why so many programs cannot share a multiprocessor, or None."""
    ctas, columns, needed = ctas_of(knobs), columns_of(knobs), shared_bytes(knobs)
    if ctas not in REGISTERS:
        return f"{CTAS}: {ctas}, there are registers for 1 or 2 programs"
    if ctas > 1 and (columns > 32 or ctas * (needed + 1024) > device.shared_bytes + 1024):
        return f"two programs: about {needed} bytes and {columns} columns a warpgroup, 32 fit the registers"
    return None


def _scattered(knobs: Knobs, grid: Grid) -> str | None:
    """Why a cluster cannot have these programs, or None."""
    size = cluster_of(knobs)
    if size > PORTABLE_CLUSTER:
        return f"{CLUSTER}: {size}, {PORTABLE_CLUSTER} programs are portable"
    if summed_by(knobs) == "cluster" and grid.programs != grid.pieces:
        return f"{CLUSTER}: {grid.pieces} splits for {grid.programs} programs, those of a tile would not meet"
    return None


def descriptor(tensor: object, box: list[int], layout: object) -> object:
    """What the copy engine needs to know of a contiguous tensor: boxes of it, and how they lie in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)  # type: ignore[attr-defined]
