"""Launching the dense kernel: its parameters, in the order of its signature, and what fits."""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.layouts import PLAIN
from gemmpipe.templates.fits import tile_misfit
from gemmpipe.templates.signature import LINES, PARTS, SHARES, loads, operand_pointers, sizes, tile_sizes
from gemmpipe.templates.tiled import Tiled

_INT8_K = 2**31 // 2**14


@dataclass(frozen=True, kw_only=True)
class Dense(Tiled):
    """`triton`: one program a tile, split and product; bias and scales are left out of builds without them."""

    kernel: str = "gemmpipe.templates.dense_kernel:dense"
    swaps: bool = True
    overlapping: bool = True
    layout: str = PLAIN
    """The weight's that it reads (see layouts)."""
    batched: bool = False
    """Whether it computes several products."""

    def misfit(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
        """`rule: detail` of the first rule broken, or None."""
        return sum_misfit(spec) or tile_misfit(
            spec, knobs, device, accumulators=1, layout=self.layout, batched=self.batched
        )

    def pointers(self, spec: GemmSpec) -> Mapping[str, str]:
        """Operands, bias, scales, output and workspace."""
        return {**operand_pointers(spec), **PARTS}

    def integers(self, spec: GemmSpec) -> Mapping[str, int]:
        """Sizes, row strides, and how the work is shared out."""
        return {**sizes(spec), **SHARES, **LINES}

    def constants(self, spec: GemmSpec, knobs: Knobs) -> Mapping[str, Scalar]:
        """Tile sizes, and which of the code's branches run."""
        return {
            **tile_sizes(knobs),
            "SPLIT_K": "parts" if knobs["NUM_KSPLIT"] != 1 else "none",
            "SCALES": spec.x_scale.granularity if spec.x_scale else "none",
            "SHUFFLED": spec.w_layout != PLAIN,
            "BATCHED": spec.batch > 1,
            **loads(spec, knobs),
            "UPCAST": spec.x_dtype == "bfloat16" and self.interpreted(),
            "SWAP_AB": bool(knobs.get("SWAP_AB")),
        }


def sum_misfit(spec: GemmSpec) -> str | None:
    """Why the kernel's one sum along K does not give this product, or None."""
    kinds = [scale.granularity if scale else None for scale in (spec.x_scale, spec.w_scale)]
    if kinds[0] != kinds[1] or kinds[0] not in (None, "row", "tensor"):
        return f"scales: one an operand, one a row of both, or none, not {kinds}"
    if spec.x_dtype != spec.w_dtype:
        return f"operands: both of one type, not {spec.x_dtype} and {spec.w_dtype}"
    return int8_misfit(spec)


def int8_misfit(spec: GemmSpec) -> str | None:
    """Why an int32 sum along K does not hold this product, or None."""
    if spec.x_dtype == "int8" and spec.k > _INT8_K:
        return f"int32 sum: K={spec.k} products of 2**14 can exceed 2**31 from {_INT8_K} on"
    return None
