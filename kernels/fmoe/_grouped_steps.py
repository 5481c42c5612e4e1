"""The launches of a call that sorts rows by expert first: places, rows there, product, activation, product, sum."""

from collections.abc import Mapping

from gemmpipe.data import Device, Knobs, Scalar
from gemmpipe.experts import experts_of
from gemmpipe.family import GemmSpec
from gemmpipe.kernels.fmoe._grouped_tile import KERNEL, capacity_of, product, quantises
from gemmpipe.kernels.fmoe._steps import (
    COLUMNS,
    FP32,
    INT,
    TOP,
    Step,
    bins_of,
    groups_of,
    most_blocks,
    scales_of,
)
from gemmpipe.launching.workspace import Shape
from gemmpipe.templates.axes import integer
from gemmpipe.templates.tiled import ceil_div, next_power
from gemmpipe.templates.two_stage import FUSED

SORTED = "gemmpipe.kernels.fmoe._sorted"
_COUNTED = 1024  # pairs of a program that counts
_SCANNED = 8192  # pairs that a program looks through at a time
_OVERLAPPED = 256  # pairs
KERNELS = (KERNEL, *(f"{SORTED}:{name}" for name in ("count_pairs", "sort_pairs", "sorted_rows", "total_of_places")))


def scratch(spec: GemmSpec, knobs: Knobs) -> dict[str, Shape]:
    """The tensors between the launches."""
    experts, capacity = experts_of(spec), capacity_of(spec, knobs)
    blocks = most_blocks(spec, integer(knobs, "BLOCK_SIZE_M"))
    found: dict[str, Shape] = {
        "places": ((spec.m * experts.topk,), INT),
        "counts": ((max(1, chunks_of(spec)), bins_of(spec)), INT),
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
    found = [_count_pairs(spec, interpreted)] if chunks_of(spec) else []
    found += [_sort_pairs(spec, knobs, interpreted), _bring(spec, knobs, interpreted)]
    wide = "inner" if quantises(spec, knobs) or (fused and not experts.quantised) else "wide"
    found.append(product(spec, knobs, device, 1, wide))
    if wide == "wide":
        found.append(_activate(spec, knobs, interpreted))
    return (*found, product(spec, knobs, device, 2, "parts"), _total(spec, interpreted))


def chunks_of(spec: GemmSpec) -> int:
    """In how many chunks pairs are counted by a launch of their own; 0: so few that each program counts them all."""
    pairs = spec.m * experts_of(spec).topk
    return ceil_div(pairs, _COUNTED) if pairs > 4 * _COUNTED else 0


def _count_pairs(spec: GemmSpec, interpreted: bool) -> Step:
    experts = experts_of(spec)
    return Step(
        kernel="count_pairs",
        module=SORTED,
        tensors={"ids_ptr": "ids", "places_ptr": "places", "counts_ptr": "counts"},
        integers={"pairs": spec.m * experts.topk, "experts": experts.count},
        constants={"BINS": bins_of(spec), "CHUNK": _COUNTED, "INTERPRETED": interpreted},
        grid=(chunks_of(spec), 1, 1),
        options=_in_turn(spec, 4),
    )


def _sort_pairs(spec: GemmSpec, knobs: Knobs, interpreted: bool) -> Step:
    experts, chunks = experts_of(spec), chunks_of(spec)
    pairs = spec.m * experts.topk
    chunk = min(_SCANNED, max(128, next_power(pairs)))
    return Step(
        kernel="sort_pairs",
        module=SORTED,
        tensors={
            "ids_ptr": "ids",
            "places_ptr": "places",
            "counts_ptr": "counts" if chunks else None,
            "owners_ptr": "owners",
            "rows_ptr": "rows",
            "blocks_ptr": "blocks",
        },
        integers={"pairs": pairs, "experts": experts.count, "chunks": chunks},
        constants={
            "BLOCK_SIZE_M": knobs["BLOCK_SIZE_M"],
            "BINS": bins_of(spec),
            "CHUNK": chunk,
            "INTERPRETED": interpreted,
        },
        grid=(experts.count, 1, 1),
        options=_in_turn(spec, max(4, chunk // 512)),
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
        options=_in_turn(spec, min(8, max(1, groups * group // 256))),
    )


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
        options=_in_turn(spec, 4),
    )


def _in_turn(spec: GemmSpec, warps: int) -> dict[str, Scalar]:
    """Of a launch that, where there is little to do, may begin while the one before ends (see _sorted.take_turns).

    Qwen3-30B's experts on an H200 (2026-11-21): at 1 token 28.8 us in all, 29.4 where each waits for the end of the one
    before; but at 1024 tokens 231 and 227, at 4096 535 and 531.
    """
    overlap: dict[str, Scalar] = {"launch_pdl": True} if spec.m * experts_of(spec).topk <= _OVERLAPPED else {}
    return {**overlap, "num_warps": warps}
