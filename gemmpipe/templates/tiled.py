"""What the tiled Triton kernels of all families share: how knobs are normalised, builds, grid, workspace and launch."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from gemmpipe.data import Build, Device, Knobs, Scalar
from gemmpipe.family import Experts, GemmSpec, Inputs, Prepared
from gemmpipe.launching.builds import find_kernel, is_interpreted
from gemmpipe.launching.launches import Kernel, KernelLaunch
from gemmpipe.launching.source_hash import source_hash
from gemmpipe.layouts import PLAIN, TILES_16X16
from gemmpipe.operand_types import element_bytes
from gemmpipe.spec import COLUMN, ROW, order_of
from gemmpipe.templates.axes import AMD_ONLY, AXES, CLUSTER, CTAS, KIND, NEUTRAL, SWAP, check_axes, integer
from gemmpipe.templates.signature import PARTS, operand_tensors

if TYPE_CHECKING:
    import torch

    from gemmpipe.space import Space

WGMMA_ROWS = 64
"""What a Hopper warpgroup multiplies at once."""
_LINE = 128
_PREFETCHED_LINES = 16
_PREFETCHED_BYTES = 13 * 10**6
_RDNA_WAVE = 32
_RDNA: Mapping[str, Scalar] = {"matrix_instr_nonkdim": 16, "kpack": 1}
_XCDS = {"gfx942": 8, "gfx950": 8}  # MI300X, MI355X; each has its own L2


@lru_cache(maxsize=64)
def hash_of(kernel: str) -> str:
    """The source hash of `module:attribute`, read once a process: every candidate of every problem asks for it."""
    return source_hash(find_kernel(kernel))


def ceil_div(whole: int, part: int) -> int:
    """How many parts cover the whole."""
    return -(-whole // part)


def tiles_of(spec: GemmSpec, knobs: Knobs) -> tuple[int, int]:
    """Rows and columns of tiles."""
    return ceil_div(spec.m, integer(knobs, "BLOCK_SIZE_M")), ceil_div(spec.n, integer(knobs, "BLOCK_SIZE_N"))


def facts_of(spec: GemmSpec, device: Device) -> dict[str, Scalar]:
    """What entries of a space can ask about."""
    return {
        "arch": device.gfx,
        "vendor": device.vendor,
        "M": spec.m,
        "N": spec.n,
        "K": spec.k,
        "B": spec.batch,
        **(_routing_facts(spec, spec.experts) if spec.experts else {}),
    }


def _routing_facts(spec: GemmSpec, experts: Experts) -> dict[str, Scalar]:
    """Experts, experts of a row, and the rows that an expert gets on average."""
    return {"E": experts.count, "topk": experts.topk, "rows": ceil_div(spec.m * experts.topk, experts.count)}


@dataclass(frozen=True, kw_only=True)
class Tiled(Kernel):
    """One program a tile and split of K; a family says which kernel, which arguments, and what fits."""

    label = "triton"
    kernel: str
    """`module:attribute` of the JIT function."""
    overlapping: bool = False
    """Whether the kernel has the constants of programmatic dependent launch (see tiles.overlap)."""
    any_order: bool = False
    """Whether the kernel has the constant M_MAJOR: block scales of x by columns; `x_scale_stride` is theirs then."""
    swaps: bool = False
    """Whether the kernel has the knob SWAP_AB: weights on the wide side of the matrix instruction."""

    @abstractmethod
    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Every pointer parameter and its Triton type (`constexpr` where this product has none), in order."""

    @abstractmethod
    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Every integer parameter after the pointers, by its value for contiguous operands, in order."""

    @abstractmethod
    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Every compile-time constant, in order."""

    def arguments(self, inputs: Inputs, prepared: Prepared, out: "torch.Tensor") -> Mapping[str, object]:
        """The tensors behind the pointers (but the workspace) and the strides of these operands; others are ignored."""
        return operand_tensors(inputs, prepared, out)

    def check(self, space: "Space") -> None:
        """Raises UserError for an axis that is no knob of this kernel, one that is missing, or a value out of range."""
        check_axes(space, (*AXES, SWAP) if self.swaps else AXES)

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that it knows."""
        return (*AXES, SWAP) if self.swaps else AXES

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's points. Raises UserError for an axis that is no knob of this kernel, or one that is missing."""
        self.check(space)
        unused = (CTAS, CLUSTER) if device.vendor == "amd" else (*AMD_ONLY, CTAS, CLUSTER)
        return space.points({**facts_of(spec, device), KIND: "plain"}, unused)

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Drop what this vendor's compiler ignores, and what this problem makes meaningless."""
        kept = {**NEUTRAL, **{k: v for k, v in knobs.items() if v is not None or k not in NEUTRAL}}
        if device.vendor != "amd":
            kept = {k: v for k, v in kept.items() if k not in AMD_ONLY}
        elif device.gfx == "gfx950" and "kpack" in kept:
            kept["kpack"] = 1  # the compiler overrides it from gfx950 on
        elif device.warp_size == _RDNA_WAVE:  # its matrix instructions are 16 x 16, and there is nothing to pack
            kept |= {name: value for name, value in _RDNA.items() if name in kept}
        narrow = min(integer(kept, "BLOCK_SIZE_M"), integer(kept, "BLOCK_SIZE_N"))
        if kept.get("matrix_instr_nonkdim") is not None and integer(kept, "matrix_instr_nonkdim") > narrow:
            kept["matrix_instr_nonkdim"] = 16  # the compiler takes the narrow instruction for a narrow tile
        kept.pop(KIND, None)
        kept.pop(CTAS, None)
        kept.pop(CLUSTER, None)
        if not kept.get(SWAP):
            kept.pop(SWAP, None)  # not swapped is the plain kernel, under the name that it has without the knob
        blocks = ceil_div(spec.k, integer(kept, "BLOCK_SIZE_K"))
        share = ceil_div(blocks, min(blocks, max(1, integer(kept, "NUM_KSPLIT"))))
        kept["NUM_KSPLIT"] = ceil_div(blocks, share)  # splits that would have no K block do not run
        if 1 in tiles_of(spec, kept):
            kept["GROUP_SIZE_M"] = 1  # one row or column of tiles has one order
        return kept

    def knobs_of(self, row: Mapping[str, Scalar], spec: GemmSpec, device: Device) -> Knobs | None:
        """A row that names no knobs (aiter's of `triton`): the first tile that fits, unmeasured, the widest first."""
        m = max(16, min(64, next_power(spec.m)))
        k = int(_LINE / element_bytes(spec.x_dtype))
        for n in (128, 64, 32, 16):
            tile = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 8}
            knobs = self.normalise(spec, {**tile, "num_warps": 4, "num_stages": 2}, device)
            if self.misfit(spec, knobs, device) is None:
                return knobs
        return None

    def wasteful(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """Tiles that are mostly padding, and operands swapped for nothing."""
        m, n = integer(knobs, "BLOCK_SIZE_M"), integer(knobs, "BLOCK_SIZE_N")
        # A tile of 64 rows can pay even for M = 16, as Hopper's warpgroup instruction starts there (measured on an
        # H200, 2026-11-21); with more, at least half are padding and there is no wider instruction to gain.
        if m > WGMMA_ROWS and m >= 2 * next_power(spec.m):
            return f"tile beyond the problem: {m} rows for M={spec.m}"
        if n > WGMMA_ROWS and n >= 2 * next_power(spec.n):
            return f"tile beyond the problem: {n} columns for N={spec.n}"
        # Swapped operands gain nothing but the 64-row instruction of Hopper and later, for few rows.
        if knobs.get(SWAP) and (device.vendor != "nvidia" or n < WGMMA_ROWS or m > WGMMA_ROWS):
            return f"swapped operands: a {m}x{n} tile on {device.gfx} has no wider side to offer"
        return None

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """One for each order of block scales; GROUP_SIZE_M, the number of splits, M, N and K are arguments of it."""
        return tuple(self._build(spec, knobs, device, order) for order in orders_of(spec, self.scale_orders(spec)))

    def scale_orders(self, spec: GemmSpec) -> tuple[str, ...]:
        """Both where the kernel knows both."""
        by_block = spec.x_scale is not None and spec.x_scale.granularity == "block"
        return (ROW, COLUMN) if by_block and self.any_order else (ROW,)

    def _build(self, spec: GemmSpec, knobs: Knobs, device: Device, order: str) -> Build:
        pointers, integers = self.pointers(spec), self.integers(spec)
        # Sizes and strides decide how wide a load or store may be; M and the scales' strides do not.
        aligned = [n for n in ("N", "K", "x_stride", "w_stride", "out_stride") if integers[n] % 16 == 0]
        options = {name: knobs[name] for name in ("num_warps", "num_stages", *AMD_ONLY) if name in knobs}
        constants = dict(self.constants(spec, knobs))
        if self.overlapping:
            constants |= {"XCDS": _XCDS.get(device.gfx, 1), "OVERLAP": self._starts_early(device)}
        if constants.get("OVERLAP"):
            options["launch_pdl"] = True
        if self.any_order:
            constants["M_MAJOR"] = order == COLUMN
        return build_of(self.kernel, pointers, integers, constants, options, aligned)

    def _starts_early(self, device: Device) -> bool:
        """Whether a launch overlaps the one before it (programmatic dependent launch: sm_90 and later)."""
        early = device.kind == "cuda" and int(device.gfx.removeprefix("sm_")) >= 90
        return early and not self.interpreted()

    def kernel_name(self, knobs: Knobs) -> str:
        """`blockscale@3fa9c1d2`, or `blockscale_splitk@...`."""
        split = "_splitk" if integer(knobs, "NUM_KSPLIT") > 1 else ""
        return f"{self.kernel.split(':')[1]}{split}@{hash_of(self.kernel)[:8]}"

    def launch(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> KernelLaunch:
        """One program a tile, split and product."""
        build = self._build(spec, knobs, device, order_given(spec, inputs, self.scale_orders(spec)))
        tiles_m, tiles_n = tiles_of(spec, knobs)
        splits = integer(knobs, "NUM_KSPLIT")
        sizes = {**self.integers(spec), "group_m": integer(knobs, "GROUP_SIZE_M"), "splits": splits}
        parts = self.workspace_bytes(spec, knobs) // 4
        if self.overlapping:
            sizes["lines"] = prefetched_lines(spec, splits)
        return KernelLaunch(
            build=build,
            grid=(tiles_m * tiles_n, splits, spec.batch),
            arguments=needed_by(build, {**sizes, **self.arguments(inputs, prepared, out)}),
            parts=parts,
            counters=spec.batch * tiles_m * tiles_n if parts else 0,
        )

    def workspace_bytes(self, spec: GemmSpec, knobs: Knobs) -> int:
        """What split-K's parts take; 0 for a kernel that adds them up without."""
        return workspace_bytes(spec, knobs)

    def interpreted(self) -> bool:
        """Whether the kernel runs under Triton's interpreter."""
        return is_interpreted(find_kernel(self.kernel))


def orders_of(spec: GemmSpec, read: tuple[str, ...]) -> tuple[str, ...]:
    """The memory orders of x's block scales that this product may come in, of those that are `read` as they lie."""
    scaling = spec.x_scale
    if scaling is None or spec.m == 1 or spec.k <= scaling.block[1]:  # a single row or block lies in both
        return read[:1]
    if scaling.order is None:
        return read
    return (scaling.order,) if scaling.order in read else read[:1]


def order_given(spec: GemmSpec, inputs: Inputs, read: tuple[str, ...]) -> str:
    """The memory order of x's block scales, ROW of others. Raises ValueError for one that is not `read`."""
    if spec.x_scale is None or spec.x_scale.granularity != "block" or inputs.x_scale is None:
        return ROW
    order = order_of(inputs.x_scale)
    if order not in read:
        raise ValueError(f"x_scale has strides {tuple(inputs.x_scale.stride())}, expected {' or '.join(read)} order")
    return order


def needed_by(build: Build, given: Mapping[str, object]) -> dict[str, object]:
    """Those of the arguments that a build takes. Raises ValueError for a missing operand."""
    names = [name for name, kind in build.signature if kind != "constexpr" and name not in PARTS]
    if absent := [name for name in names if given.get(name) is None]:
        raise ValueError(f"{build.kernel} needs {', '.join(absent)}")
    return {name: given[name] for name in names}


def prefetched_lines(spec: GemmSpec, splits: int) -> int:
    """How many 128-byte lines of each of its rows of w a program asks for while the kernel before still runs.

    8192x1024 in fp8 at M=1: 5.4 us without, 4.5 us with all of it. More than a fifth of L2 pushes out what the kernel
    before reads, and split products wait for one another rather than for memory (H200, 2026-11-21).
    """
    row_bytes = int(spec.k * element_bytes(spec.w_dtype))
    if splits > 1 or spec.w_layout not in (PLAIN, TILES_16X16):
        return 0
    return min(_PREFETCHED_LINES, row_bytes // _LINE, _PREFETCHED_BYTES // (spec.batch * spec.n * _LINE))


def next_power(value: int) -> int:
    """The next power of two, from the value itself on."""
    return 1 << (value - 1).bit_length()


def build_of(
    kernel: str,
    pointers: Mapping[str, str],
    integers: Iterable[str],
    constants: Mapping[str, Scalar],
    options: Mapping[str, Scalar],
    aligned: Iterable[str],
) -> Build:
    """The build of a kernel whose parameters are, in this order, pointers (a Triton type, or `constexpr` for one that
    is left out), 32-bit integers and constants; all pointers and the `aligned` integers are divisible by 16."""
    absent: dict[str, Scalar] = {name: None for name, kind in pointers.items() if kind == "constexpr"}
    constants = {**absent, **constants}
    signature = {**pointers, **dict.fromkeys(integers, "i32"), **dict.fromkeys(constants, "constexpr")}
    return Build(
        kernel=kernel,
        source_hash=hash_of(kernel),
        signature=tuple(signature.items()),
        constants=tuple(constants.items()),
        aligned=(*(name for name, kind in pointers.items() if kind != "constexpr"), *aligned),
        options=tuple(sorted(options.items())),
    )


def workspace_bytes(spec: GemmSpec, knobs: Knobs) -> int:
    """The fp32 parts of all tiles, splits and products; 0 without split-K."""
    splits = integer(knobs, "NUM_KSPLIT")
    if splits == 1:
        return 0
    tile_m, tile_n = integer(knobs, "BLOCK_SIZE_M"), integer(knobs, "BLOCK_SIZE_N")
    return 4 * spec.batch * splits * ceil_div(spec.m, tile_m) * tile_m * ceil_div(spec.n, tile_n) * tile_n
