"""Base of all tiled Triton kernels: normalised knobs, builds, grid, workspace and launch.

Also the knobs of candidates that are two products in a row (`stage_knobs`).
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from gemmpipe.core.data import Build, Device, Knobs, Scalar
from gemmpipe.core.renamed import accept_old_methods
from gemmpipe.core.spec import COLUMN, ROW, scale_order
from gemmpipe.family import Experts, GemmSpec, Inputs, Prepared
from gemmpipe.family.dtypes import element_bytes
from gemmpipe.family.layouts import ROW_MAJOR, TILES_16X16
from gemmpipe.launch.build import find_kernel, is_interpreted
from gemmpipe.launch.launch import KernelImplementation, KernelLaunch
from gemmpipe.launch.replays import no_dependent_launch_reason
from gemmpipe.launch.source_hash import source_hash
from gemmpipe.templates.params import (
    AMD_KNOBS,
    KERNEL_TYPE,
    NEUTRAL_VALUES,
    SWAP_AB,
    TILED_AXES,
    WARP_SPECIALISED_KNOBS,
    WORKSPACE_PARAMETERS,
    check_axes,
    int_knob,
    operand_arguments,
)

if TYPE_CHECKING:
    import torch

    from gemmpipe.family.space import Space


WGMMA_M = 64
"""Rows of a Hopper warpgroup's matrix instruction."""
STAGE2_SUFFIX = "_2"
"""Ends the name of a knob of the second stage; without it the second stage takes the first's."""
FUSED_ACT = "FUSED_ACT"
"""True: the first stage's kernel computes gate and up in one program and activates before it stores."""
OVERLAP = "OVERLAP"
"""True: every launch of a call begins while the previous one ends (programmatic dependent launch)."""
GATHER_ROWS = "GATHER_ROWS"
"""True: the first product's loader warps read x's rows where they are; else a launch copies them to their places."""
PINGPONG = "PINGPONG"
"""True: each warpgroup of the second product multiplies tiles of its own, in turn with the other."""
FUSED_SUM = "FUSED_SUM"
"""True: the second product adds its rows to the output, in no fixed order; else they are stored, then added up."""
STAGE2_KNOBS = tuple(
    f"{name}{STAGE2_SUFFIX}" for name in ("BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
)
"""The second stage's own knobs; BLOCK_SIZE_M is shared, since both read the same blocks of rows."""
_OLD_FIELDS = {"any_order": "supports_m_major_scales", "overlapping": "supports_pdl", "swaps": "supports_swap_ab"}
_LINE_BYTES = 128
_MAX_PREFETCH_LINES = 16
_MAX_PREFETCH_BYTES = 13 * 10**6
_RDNA_WAVE = 32
_RDNA: Mapping[str, Scalar] = {"matrix_instr_nonkdim": 16, "kpack": 1}
_XCDS = {"gfx942": 8, "gfx950": 8}  # MI300X, MI355X; each has its own L2


@lru_cache(maxsize=64)
def kernel_hash(kernel: str) -> str:
    """The source hash of `module:attribute`, computed once per process: every candidate of every problem needs it."""
    return source_hash(find_kernel(kernel))


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def tile_counts(spec: GemmSpec, knobs: Knobs) -> tuple[int, int]:
    """(rows, columns) of tiles."""
    return ceil_div(spec.m, int_knob(knobs, "BLOCK_SIZE_M")), ceil_div(spec.n, int_knob(knobs, "BLOCK_SIZE_N"))


def space_facts(spec: GemmSpec, device: Device) -> dict[str, Scalar]:
    """The facts that conditions of a space can name."""
    return {
        "arch": device.gfx,
        "vendor": device.vendor,
        "w_dtype": spec.w_dtype,
        "M": spec.m,
        "N": spec.n,
        "K": spec.k,
        "B": spec.batch,
        **(_expert_facts(spec, spec.experts) if spec.experts else {}),
    }


def _expert_facts(spec: GemmSpec, experts: Experts) -> dict[str, Scalar]:
    """Experts, experts per row, and the average rows per expert."""
    return {"E": experts.count, "topk": experts.topk, "rows": ceil_div(spec.m * experts.topk, experts.count)}


@dataclass(frozen=True, kw_only=True)
class TiledKernel(KernelImplementation):
    """One program per tile and split of K; a family defines the kernel, its arguments and its constraints."""

    label = "triton"
    kernel: str
    """`module:attribute` of the JIT function."""
    supports_pdl: bool = False
    """True if the kernel has the constants of programmatic dependent launch (device_fns.prefetch_and_gdc_wait)."""
    supports_m_major_scales: bool = False
    """True if the kernel has the constant M_MAJOR: block scales of x by columns, `x_scale_stride` between columns."""
    supports_swap_ab: bool = False
    """True if the kernel has the knob SWAP_AB: weights on the wide side of the matrix instruction."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        accept_old_methods(cls, _OLD_FIELDS)

    @abstractmethod
    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Every pointer parameter and its Triton type (`constexpr` if absent in this product), in order."""

    @abstractmethod
    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Every integer parameter after the pointers with its value for contiguous operands, in order."""

    @abstractmethod
    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Every compile-time constant, in order."""

    def arguments(self, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Mapping[str, object]:
        """The tensors of the pointers (but the workspace) and the operands' strides; other names are ignored."""
        return operand_arguments(inputs, prepared, out)

    def check(self, space: "Space") -> None:
        """Raises UserError for an unknown axis, one that is missing, or a value out of range."""
        check_axes(space, (*TILED_AXES, SWAP_AB) if self.supports_swap_ab else TILED_AXES)

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that this kernel has."""
        return (*TILED_AXES, SWAP_AB) if self.supports_swap_ab else TILED_AXES

    def configs(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's configs. Raises UserError for an unknown axis, one that is missing, or a value out of range."""
        self.check(space)
        unused = WARP_SPECIALISED_KNOBS if device.vendor == "amd" else (*AMD_KNOBS, *WARP_SPECIALISED_KNOBS)
        return space.configs({**space_facts(spec, device), KERNEL_TYPE: "plain"}, unused)

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Drops knobs that this vendor's compiler ignores or that make no difference for this problem."""
        kept = {**NEUTRAL_VALUES, **{k: v for k, v in knobs.items() if v is not None or k not in NEUTRAL_VALUES}}
        if device.vendor != "amd":
            kept = {k: v for k, v in kept.items() if k not in AMD_KNOBS}
        elif device.gfx == "gfx950" and "kpack" in kept:
            kept["kpack"] = 1  # the compiler overrides it from gfx950 on
        elif device.warp_size == _RDNA_WAVE:  # its matrix instructions are 16 x 16, and there is nothing to pack
            kept |= {name: value for name, value in _RDNA.items() if name in kept}
        narrow = min(int_knob(kept, "BLOCK_SIZE_M"), int_knob(kept, "BLOCK_SIZE_N"))
        if kept.get("matrix_instr_nonkdim") is not None and int_knob(kept, "matrix_instr_nonkdim") > narrow:
            kept["matrix_instr_nonkdim"] = 16  # the compiler takes the narrow instruction for a narrow tile
        for name in (KERNEL_TYPE, *WARP_SPECIALISED_KNOBS):
            kept.pop(name, None)
        if not kept.get(SWAP_AB):
            kept.pop(SWAP_AB, None)  # not swapped is the plain kernel, with the same identity as without the knob
        blocks = ceil_div(spec.k, int_knob(kept, "BLOCK_SIZE_K"))
        share = ceil_div(blocks, min(blocks, max(1, int_knob(kept, "NUM_KSPLIT"))))
        kept["NUM_KSPLIT"] = ceil_div(blocks, share)  # splits that would have no K block do not run
        if 1 in tile_counts(spec, kept):
            kept["GROUP_SIZE_M"] = 1  # one row or column of tiles has one order
        return kept

    def knobs_from_row(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """Knobs for a row without any (aiter's of `triton`): the widest tile that fits, unmeasured."""
        m = max(16, min(64, next_power_of_2(spec.m)))
        k = int(_LINE_BYTES / element_bytes(spec.x_dtype))
        for n in (128, 64, 32, 16):
            tile = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 8}
            knobs = self.normalise(spec, {**tile, "num_warps": 4, "num_stages": 2}, device)
            if self.unsupported_reason(spec, knobs, device) is None:
                return knobs
        return None

    def dominated_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` for tiles that are mostly padding and for swapped operands without a gain, or None."""
        m, n = int_knob(knobs, "BLOCK_SIZE_M"), int_knob(knobs, "BLOCK_SIZE_N")
        # A tile of 64 rows can pay even for M = 16, as Hopper's warpgroup instruction starts there (measured on an
        # H200, 2026-11-21); with more, at least half are padding and there is no wider instruction to gain.
        if m > WGMMA_M and m >= 2 * next_power_of_2(spec.m):
            return f"tile beyond the problem: {m} rows for M={spec.m}"
        if n > WGMMA_M and n >= 2 * next_power_of_2(spec.n):
            return f"tile beyond the problem: {n} columns for N={spec.n}"
        # Swapped operands gain nothing but the 64-row instruction of Hopper and later, for few rows.
        if knobs.get(SWAP_AB) and (device.vendor != "nvidia" or n < WGMMA_M or m > WGMMA_M):
            return f"swapped operands: a {m}x{n} tile on {device.gfx} has no wider side to offer"
        return None

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """One build per order of block scales; GROUP_SIZE_M, the number of splits, M, N and K are its arguments."""
        return tuple(
            self._build(spec, knobs, device, order) for order in readable_scale_orders(spec, self.scale_orders(spec))
        )

    def scale_orders(self, spec: GemmSpec) -> tuple[str, ...]:
        """Both for block scales if the kernel supports M-major ones, else row-major."""
        by_block = spec.x_scale is not None and spec.x_scale.granularity == "block"
        return (ROW, COLUMN) if by_block and self.supports_m_major_scales else (ROW,)

    def _build(self, spec: GemmSpec, knobs: Knobs, device: Device, order: str) -> Build:
        pointers, integers = self.pointers(spec), self.integers(spec)
        # The divisibility of these allows wide loads and stores; that of M and of the scales' strides does not.
        aligned = [n for n in ("N", "K", "x_stride", "w_stride", "out_stride") if integers[n] % 16 == 0]
        options = {name: knobs[name] for name in ("num_warps", "num_stages", *AMD_KNOBS) if name in knobs}
        constants = dict(self.constants(spec, knobs))
        if self.supports_pdl:
            constants |= {"XCDS": _XCDS.get(device.gfx, 1), "OVERLAP": self._uses_pdl(device)}
        if constants.get("OVERLAP"):
            options["launch_pdl"] = True
        if self.supports_m_major_scales:
            constants["M_MAJOR"] = order == COLUMN
        return make_build(self.kernel, pointers, integers, constants, options, aligned)

    def _uses_pdl(self, device: Device) -> bool:
        """See `uses_pdl`."""
        return uses_pdl(device, interpreted=self.interpreted())

    def kernel_name(self, knobs: Knobs) -> str:
        """`blockscale@3fa9c1d2`, or `blockscale_splitk@...`."""
        split = "_splitk" if int_knob(knobs, "NUM_KSPLIT") > 1 else ""
        return f"{self.kernel.split(':')[1]}{split}@{kernel_hash(self.kernel)[:8]}"

    def launch(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> KernelLaunch:
        """One program per tile, split and product."""
        build = self._build(spec, knobs, device, check_scale_order(spec, inputs, self.scale_orders(spec)))
        tiles_m, tiles_n = tile_counts(spec, knobs)
        splits = int_knob(knobs, "NUM_KSPLIT")
        sizes = {**self.integers(spec), "group_m": int_knob(knobs, "GROUP_SIZE_M"), "splits": splits}
        parts = self.workspace_bytes(spec, knobs) // 4
        if self.supports_pdl:
            sizes["lines"] = prefetched_lines(spec, splits)
        return KernelLaunch(
            build=build,
            grid=(tiles_m * tiles_n, splits, spec.batch),
            arguments=select_arguments(build, {**sizes, **self.arguments(inputs, prepared, out)}),
            parts=parts,
            counters=spec.batch * tiles_m * tiles_n if parts else 0,
            launch_pdl=self.launch_pdl,
        )

    def workspace_bytes(self, spec: GemmSpec, knobs: Knobs) -> int:
        """Bytes of split-K's parts; 0 for a kernel that adds them up without a workspace."""
        return workspace_bytes(spec, knobs)

    def interpreted(self) -> bool:
        """True if the kernel runs under Triton's interpreter."""
        return is_interpreted(find_kernel(self.kernel))


def uses_pdl(device: Device, *, interpreted: bool) -> bool:
    """True if a launch overlaps the previous one (programmatic dependent launch: sm_90 and later)."""
    return not interpreted and not no_dependent_launch_reason(device)


def readable_scale_orders(spec: GemmSpec, read: tuple[str, ...]) -> tuple[str, ...]:
    """The memory orders of x's block scales that this product may have, of those that a kernel can `read`."""
    scaling = spec.x_scale
    if scaling is None or spec.m == 1 or spec.k <= scaling.block[1]:  # a single row or block has both orders
        return read[:1]
    if scaling.order is None:
        return read
    return (scaling.order,) if scaling.order in read else read[:1]


def check_scale_order(spec: GemmSpec, inputs: Inputs, read: tuple[str, ...]) -> str:
    """The memory order of x's block scales, ROW of others. Raises ValueError for one that is not `read`."""
    if spec.x_scale is None or spec.x_scale.granularity != "block" or inputs.x_scale is None:
        return ROW
    order = scale_order(inputs.x_scale)
    if order not in read:
        raise ValueError(f"x_scale has strides {tuple(inputs.x_scale.stride())}, expected {' or '.join(read)} order")
    return order


def select_arguments(build: Build, given: Mapping[str, object]) -> dict[str, object]:
    """The arguments that a build takes. Raises ValueError for a missing operand."""
    names = [name for name, kind in build.signature if kind != "constexpr" and name not in WORKSPACE_PARAMETERS]
    if absent := [name for name in names if given.get(name) is None]:
        raise ValueError(f"{build.kernel} needs {', '.join(absent)}")
    return {name: given[name] for name in names}


def prefetched_lines(spec: GemmSpec, splits: int) -> int:
    """128-byte lines of each of its rows of w that a program prefetches while the previous kernel still runs.

    8192x1024 in fp8 at M=1: 5.4 us without, 4.5 us with all of it. More than a fifth of L2 evicts what the previous
    kernel reads, and split products wait for one another rather than for memory (H200, 2026-11-21).
    """
    row_bytes = int(spec.k * element_bytes(spec.w_dtype))
    if splits > 1 or spec.w_layout not in (ROW_MAJOR, TILES_16X16):
        return 0
    return min(
        _MAX_PREFETCH_LINES, row_bytes // _LINE_BYTES, _MAX_PREFETCH_BYTES // (spec.batch * spec.n * _LINE_BYTES)
    )


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()


def make_build(
    kernel: str,
    pointers: Mapping[str, str],
    integers: Iterable[str],
    constants: Mapping[str, Scalar],
    options: Mapping[str, Scalar],
    aligned: Iterable[str],
) -> Build:
    """The build of a kernel with these parameters in this order: pointers, 32-bit integers, constants.

    `pointers`: their Triton types, `constexpr` for one that is left out. All pointers and the `aligned` integers are
    divisible by 16.
    """
    absent: dict[str, Scalar] = {name: None for name, kind in pointers.items() if kind == "constexpr"}
    constants = {**absent, **constants}
    signature = {**pointers, **dict.fromkeys(integers, "i32"), **dict.fromkeys(constants, "constexpr")}
    return Build(
        kernel=kernel,
        source_hash=kernel_hash(kernel),
        signature=tuple(signature.items()),
        constants=tuple(constants.items()),
        aligned=(*(name for name, kind in pointers.items() if kind != "constexpr"), *aligned),
        options=tuple(sorted(options.items())),
    )


def workspace_bytes(spec: GemmSpec, knobs: Knobs) -> int:
    """Bytes of the fp32 parts of all tiles, splits and products; 0 without split-K."""
    splits = int_knob(knobs, "NUM_KSPLIT")
    if splits == 1:
        return 0
    tile_m, tile_n = int_knob(knobs, "BLOCK_SIZE_M"), int_knob(knobs, "BLOCK_SIZE_N")
    return 4 * spec.batch * splits * ceil_div(spec.m, tile_m) * tile_m * ceil_div(spec.n, tile_n) * tile_n


def stage_knobs(knobs: Knobs, stage: int) -> dict[str, Scalar]:
    """The knobs of stage 1 or 2 under the names without a suffix."""
    own = {name: value for name, value in knobs.items() if name not in STAGE2_KNOBS and name != FUSED_ACT}
    if stage == 2:
        own |= {name.removesuffix(STAGE2_SUFFIX): value for name, value in knobs.items() if name in STAGE2_KNOBS}
    return own
