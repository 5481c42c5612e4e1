"""Launching the warp-specialised kernel: descriptors, persistent grid, and what fits."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmpipe.data import Build, Device, Knobs, Scalar
from gemmpipe.family import GemmSpec, Inputs, Prepared
from gemmpipe.launches import Kernel, KernelLaunch
from gemmpipe.tiled import TYPES, ceil_div, facts_of, hash_of, integer

if TYPE_CHECKING:
    import torch

    from gemmpipe.space import Space

KERNEL = "gemmpipe.kernels.a8w8_blockscale._warp_specialised:blockscale_warp_specialised"
KIND = "warp_specialised"
_KNOBS = ("kernel_type", "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_stages")
_GROUP_ROWS = 64  # a warpgroup's matrix instruction
_SCALE_BLOCK = 128
_INTEGERS = ("M", "N", "w_scale_stride", "scale_stride", "blocks", "programs", "group_m")


@dataclass(frozen=True, kw_only=True)
class WarpSpecialised(Kernel):
    """`gluon`: Hopper's copy engine and warpgroups, for 64 rows and more."""

    label = "gluon"

    def knob_names(self, spec: GemmSpec, device: Device) -> tuple[str, ...]:
        """The axes that it knows."""
        return _KNOBS

    def points(self, spec: GemmSpec, device: Device, space: "Space") -> Iterable[Knobs]:
        """The space's points of this kernel type."""
        if "kernel_type" not in space.axes:
            return ()
        return (p for p in space.points(facts_of(spec, device)) if p["kernel_type"] == KIND)

    def normalise(self, spec: GemmSpec, knobs: Knobs, device: Device) -> Knobs:
        """Its own knobs alone; one row or column of tiles has one order."""
        kept = {name: knobs[name] for name in _KNOBS}
        if min(_tiles(spec, kept)) == 1:
            kept["GROUP_SIZE_M"] = 1
        return kept

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        m, n, stages = (integer(knobs, name) for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_stages"))
        if device.kind == "cpu":
            return "no GPU: Triton compiles for GPUs"
        if device.gfx != "sm_90":
            return f"architecture: warpgroup instructions are sm_90's, this is {device.gfx}"
        if spec.w_layout != "nk" or spec.batch != 1 or spec.bias:
            return "operands: this kernel reads one row-major [N, K] weight and adds no bias"
        if spec.out_dtype not in ("bfloat16", "float16"):
            return f"output: {spec.out_dtype} does not fit beside the ring"
        # A descriptor's rows begin at multiples of 16 bytes, and so do the scales of a tile's first row.
        if spec.m % 4 or spec.n % 8 or spec.k % 16:
            return f"alignment: M={spec.m} N={spec.n} K={spec.k}, the copy engine needs multiples of 4, 8 and 16"
        if m not in (_GROUP_ROWS, 2 * _GROUP_ROWS) or integer(knobs, "BLOCK_SIZE_K") != _SCALE_BLOCK:
            return f"tile: {m} rows, BLOCK_SIZE_K={knobs['BLOCK_SIZE_K']}; two warpgroups share 64 or 128 rows"
        if m > _GROUP_ROWS and spec.m <= _GROUP_ROWS:
            return f"tile beyond the problem: {m} rows for M={spec.m}"
        # Sum and two temporaries: 3 x 64 registers a thread are left of 232 with 128 columns a warpgroup.
        if not 16 <= _columns(knobs) <= _SCALE_BLOCK or n & (n - 1):
            return f"registers: {_columns(knobs)} columns a warpgroup, 16 to 128 are held with two temporaries"
        needed = stages * ((m + n) * _SCALE_BLOCK + 4 * m) + 2 * 2 * _GROUP_ROWS * _columns(knobs) + 1024
        if stages < 2 or needed > device.shared_bytes:
            return f"shared memory: about {needed} bytes for {stages} stages, {device.shared_bytes} a block"
        return None

    def builds(self, spec: GemmSpec, knobs: Knobs, device: Device) -> tuple[Build, ...]:
        """One build for every size."""
        constants: dict[str, Scalar] = {
            "BLOCK_SIZE_M": knobs["BLOCK_SIZE_M"],
            "BLOCK_SIZE_N": knobs["BLOCK_SIZE_N"],
            "BLOCK_SIZE_K": knobs["BLOCK_SIZE_K"],
            "STAGES": knobs["num_stages"],
            "SCALE_BLOCK": _SCALE_BLOCK,
        }
        signature = {
            name: f"tensordesc<{t}{shape},{layout!r}>" for name, (t, shape, layout) in _tensors(spec, knobs).items()
        }
        signature |= {
            "w_scale_ptr": "*fp32",
            **dict.fromkeys(_INTEGERS, "i32"),
            **dict.fromkeys(constants, "constexpr"),
        }
        build = Build(
            kernel=KERNEL,
            source_hash=hash_of(KERNEL),
            signature=tuple(signature.items()),
            constants=tuple(constants.items()),
            aligned=("w_scale_ptr",),
            options=(("num_warps", 4),),
        )
        return (build,)

    def kernel_name(self, knobs: Knobs) -> str:
        """The function and the hash of its source."""
        return f"{KERNEL.split(':')[1]}@{hash_of(KERNEL)[:8]}"

    def launch(
        self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: "torch.Tensor"
    ) -> KernelLaunch:
        """As few programs as the same number of rounds over the device needs; descriptors are made here."""
        weights = prepared.weights
        if inputs.x_scale_t is None or weights.w_scale is None:
            raise ValueError("this kernel needs x_scale_t and w_scale")
        (build,) = self.builds(spec, knobs, device)
        tiles_m, tiles_n = _tiles(spec, knobs)
        programs = ceil_div(tiles_m * tiles_n, ceil_div(tiles_m * tiles_n, device.cu_num))
        scales = inputs.x_scale_t.t()
        values = (spec.m, spec.n, weights.w_scale.stride(0), scales.stride(0), scales.shape[0], programs)
        arguments: dict[str, object] = dict(zip(_INTEGERS, (*values, integer(knobs, "GROUP_SIZE_M")), strict=True))
        tensors = {"x": inputs.x, "w": weights.w, "scales": scales.reshape(-1), "out": out}
        for name, (_, shape, layout) in _tensors(spec, knobs).items():
            arguments[name] = _descriptor(tensors[name], shape, layout)
        arguments["w_scale_ptr"] = weights.w_scale
        return KernelLaunch(build=build, grid=(programs, 1, 1), arguments=arguments)


def _columns(knobs: Knobs) -> int:
    """Columns of a warpgroup: all of a 128-row tile's, half of a 64-row tile's."""
    return integer(knobs, "BLOCK_SIZE_N") * integer(knobs, "BLOCK_SIZE_M") // (2 * _GROUP_ROWS)


def _tiles(spec: GemmSpec, knobs: Knobs) -> tuple[int, int]:
    return ceil_div(spec.m, integer(knobs, "BLOCK_SIZE_M")), ceil_div(spec.n, integer(knobs, "BLOCK_SIZE_N"))


def _tensors(spec: GemmSpec, knobs: Knobs) -> dict[str, tuple[str, list[int], object]]:
    """Triton type, box and shared-memory layout of each tensor that the copy engine moves."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    fp8, half = TYPES[spec.x_dtype], TYPES[spec.out_dtype]
    m, n, columns = integer(knobs, "BLOCK_SIZE_M"), integer(knobs, "BLOCK_SIZE_N"), _columns(knobs)
    ring = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    stage = NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)
    return {
        "x": (fp8, [m, _SCALE_BLOCK], ring),
        "w": (fp8, [n, _SCALE_BLOCK], ring),
        "scales": ("fp32", [m], flat),
        "out": (half, [_GROUP_ROWS, columns], stage),
    }


def _descriptor(tensor: "torch.Tensor", box: list[int], layout: object) -> object:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)
