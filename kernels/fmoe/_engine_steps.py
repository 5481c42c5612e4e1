"""The launches of a mixture of experts in the form of vLLM's and SGLang's `fused_experts`.

Quantise x, sort pairs by expert, first product, activation, quantise, second product times the shares, sum. Sources:
vLLM 0.25.1 `fused_moe.py` (`fused_experts_impl`, `_prepare_expert_assignment`), SGLang 0.5.23 `fused_moe.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.data import Device, Knobs
from gemmpipe.experts import experts_of
from gemmpipe.family import GemmSpec
from gemmpipe.kernels.fmoe._steps import (
    FP32,
    INT,
    Step,
    activate_step,
    bins_of,
    scales_of,
    total_step,
)
from gemmpipe.launching.workspace import Shape
from gemmpipe.templates.axes import AMD_ONLY, integer
from gemmpipe.templates.signature import tile_sizes
from gemmpipe.templates.tiled import ceil_div
from gemmpipe.templates.two_stage import knobs_of_stage

MODULE = "gemmpipe.kernels.fmoe._engine_kernel"
_OWN_SUM = 4
_SPARSE = 4
"""vLLM does not sort where each expert has a pair in `_SPARSE` tokens at most: pairs * 4 <= experts."""


@dataclass(frozen=True, kw_only=True)
class EngineForm:
    """What differs between the engines' `fused_experts`."""

    label: str
    """`vllm` or `sglang`: the backend and the format."""
    naive: bool
    """Whether few pairs are multiplied unsorted, a tile each."""
    even_k: bool
    """Whether the end of K is masked only where K tiles do not divide it."""
    clamps: bool
    """Whether K tiles are cut to a group of scales; without, wider ones give wrong results."""
    apart: bool
    """Whether the second product may have a configuration of its own."""


VLLM = EngineForm(label="vllm", naive=True, even_k=False, clamps=True, apart=False)
SGLANG = EngineForm(label="sglang", naive=False, even_k=True, clamps=False, apart=True)


def is_naive(form: EngineForm, spec: GemmSpec) -> bool:
    """Whether the engine leaves the pairs of this call unsorted."""
    experts = experts_of(spec)
    return form.naive and spec.m * experts.topk * _SPARSE <= experts.count


def engine_scratch(spec: GemmSpec, knobs: Knobs) -> dict[str, Shape]:
    """The tensors between the launches, by the names that the steps use."""
    experts = experts_of(spec)
    block_m, pairs = integer(knobs, "BLOCK_SIZE_M"), spec.m * experts.topk
    blocks = engine_tiles(spec, block_m)
    found: dict[str, Shape] = {
        "pairs": ((blocks * block_m,), INT),
        "owners": ((blocks,), INT),
        "blocks": ((1,), INT),
        "counts": ((bins_of(spec),), INT),
        "next": ((bins_of(spec),), INT),
        "wide": ((pairs, experts.wide), spec.x_dtype),
        "inner": ((pairs, experts.inner), spec.x_dtype),
        "parts": ((pairs, spec.n), spec.out_dtype),
    }
    if experts.quantised:
        found["q"] = ((spec.m, spec.k), spec.w_dtype)
        found["q_scale"] = ((spec.m, scales_of(experts.quantised, spec.k)), FP32)
        found["inner_q"] = ((pairs, experts.inner), spec.w_dtype)
        found["inner_q_scale"] = ((pairs, scales_of(experts.quantised, experts.inner)), FP32)
    return found


def engine_steps(
    form: EngineForm, spec: GemmSpec, knobs: Knobs, device: Device, *, interpreted: bool
) -> tuple[Step, ...]:
    """The launches in the engine's order; `interpreted`: for Triton's interpreter, whose bf16 and fp8 need help."""
    experts = experts_of(spec)
    quantised, pairs = experts.quantised, spec.m * experts.topk
    found: list[Step] = []
    x, inner = ("q", "inner_q") if quantised else ("x", "inner")
    if quantised:
        found.append(activate_step(spec, quantised, "x", "q", (spec.m, spec.k), "none", False, interpreted))
    found += [_count(pairs)] if is_naive(form, spec) else _sort(spec, knobs)
    found.append(_product(form, spec, knobs, 1, x, device, interpreted))
    found.append(
        activate_step(
            spec, None, "wide", "inner", (pairs, experts.inner), experts.activation, experts.gated, interpreted
        )
    )
    if quantised:
        sizes = (pairs, experts.inner)
        found.append(activate_step(spec, quantised, "inner", "inner_q", sizes, "none", False, interpreted))
    found.append(_product(form, spec, knobs, 2, inner, device, interpreted))
    if not sums_in_torch(spec):
        found.append(total_step(spec, interpreted))
    return tuple(found)


def sums_in_torch(spec: GemmSpec) -> bool:
    """Whether the engines add a row's parts up by torch's sum: their own kernel takes two to four (`moe_sum`)."""
    return experts_of(spec).topk > _OWN_SUM


def _sort(spec: GemmSpec, knobs: Knobs) -> list[Step]:
    """Sort pairs by expert, as `moe_align_block_size` does: fill, count, begin each expert's rows, scatter."""
    experts = experts_of(spec)
    pairs, block_m = spec.m * experts.topk, integer(knobs, "BLOCK_SIZE_M")
    rows, bins = engine_tiles(spec, block_m) * block_m, bins_of(spec)
    sizes = {"pairs": pairs, "experts": experts.count}
    return [
        Step(
            kernel="fill_pairs",
            module=MODULE,
            tensors={"pairs_ptr": "pairs", "counts_ptr": "counts"},
            integers={"rows": rows, "value": pairs},
            constants={"CHUNK": 1024, "BINS": bins},
            grid=(ceil_div(rows, 1024), 1, 1),
        ),
        Step(
            kernel="count_pairs",
            module=MODULE,
            tensors={"ids_ptr": "ids", "counts_ptr": "counts"},
            integers=sizes,
            constants={"CHUNK": 256},
            grid=(ceil_div(pairs, 256), 1, 1),
        ),
        Step(
            kernel="begin_experts",
            module=MODULE,
            tensors={"counts_ptr": "counts", "next_ptr": "next", "owners_ptr": "owners", "blocks_ptr": "blocks"},
            integers={"experts": experts.count},
            constants={"BLOCK_SIZE_M": block_m, "BINS": bins},
            grid=(1, 1, 1),
        ),
        Step(
            kernel="scatter_pairs",
            module=MODULE,
            tensors={"ids_ptr": "ids", "next_ptr": "next", "pairs_ptr": "pairs"},
            integers=sizes,
            constants={"CHUNK": 256},
            grid=(ceil_div(pairs, 256), 1, 1),
        ),
    ]


def _count(pairs: int) -> Step:
    return Step(
        kernel="set_count",
        module=MODULE,
        tensors={"count_ptr": "blocks"},
        integers={"count": pairs},
        constants={},
        grid=(1, 1, 1),
        options={"num_warps": 1},
    )


def _product(
    form: EngineForm, spec: GemmSpec, knobs: Knobs, stage: int, x: str, device: Device, interpreted: bool
) -> Step:
    experts, own = experts_of(spec), knobs_of_stage(knobs, stage)
    naive = is_naive(form, spec)
    n, k = (experts.wide, spec.k) if stage == 1 else (spec.n, experts.inner)
    tiles_m = spec.m * experts.topk if naive else engine_tiles(spec, integer(own, "BLOCK_SIZE_M"))
    shares = (stage == 1) == experts.weight_first
    granularity = spec.w_scale.granularity if spec.w_scale else "none"
    group = spec.w_scale.block[1] if spec.w_scale and granularity == "block" else 1
    groups = ceil_div(k, group) if granularity == "block" else 1
    return Step(
        kernel="engine_experts",
        module=MODULE,
        tensors=_tensors(spec, stage, x, naive=naive, shares=shares),
        integers={
            "N": n,
            "K": k,
            "tiles_m": tiles_m,
            "pairs": spec.m * experts.topk,
            "x_scale_stride": groups,
            "w_scale_stride": groups,
            "group_m": integer(own, "GROUP_SIZE_M"),
        },
        constants={
            **tile_sizes(own),
            "TOPK": experts.topk if stage == 1 else 1,
            "SCALES": granularity,
            "GROUP": group,
            "SWAP_AB": swaps(spec, own, device),
            "NAIVE": naive,
            "EVEN_K": form.even_k and k % integer(own, "BLOCK_SIZE_K") == 0,
            "INTERPRETED": interpreted,
        },
        grid=(tiles_m * ceil_div(n, integer(own, "BLOCK_SIZE_N")), 1, 1),
        options={name: own[name] for name in ("num_warps", "num_stages", *AMD_ONLY) if name in own},
    )


def _tensors(spec: GemmSpec, stage: int, x: str, *, naive: bool, shares: bool) -> Mapping[str, str | None]:
    scaled = spec.w_scale is not None
    w, out = ("w", "wide") if stage == 1 else ("w2", "parts")
    return {
        "x_ptr": x,
        "w_ptr": w,
        "x_scale_ptr": f"{x}_scale" if scaled else None,
        "w_scale_ptr": f"{w}_scale" if scaled else None,
        "shares_ptr": "shares" if shares else None,
        "out_ptr": out,
        "pairs_ptr": None if naive else "pairs",
        "owners_ptr": "ids" if naive else "owners",
        "blocks_ptr": "blocks",
    }


def engine_tiles(spec: GemmSpec, block_m: int) -> int:
    """Tiles along M that the engines launch: the most that a routing can make (`moe_align_block_size`)."""
    experts = experts_of(spec)
    pairs = spec.m * experts.topk
    rows = pairs + experts.count * (block_m - 1)
    if pairs < experts.count:
        rows = min(pairs * block_m, rows)
    if spec.m < block_m:
        rows = min(rows, pairs * block_m)
    return ceil_div(rows, block_m)


def swaps(spec: GemmSpec, knobs: Knobs, device: Device) -> bool:
    """Whether the engines put the weight on the wide side: fp8 on Hopper, few rows and 64 columns or more."""
    eight = spec.w_dtype.startswith("float8")
    return (
        eight and device.gfx == "sm_90" and integer(knobs, "BLOCK_SIZE_M") < 64 and integer(knobs, "BLOCK_SIZE_N") >= 64
    )
