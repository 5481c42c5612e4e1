"""The launches of a mixture of experts in the form of vLLM's and SGLang's `fused_experts`.

Quantise x, sort pairs by expert, first product, activation, quantise, second product times the shares, sum. Sources:
vLLM 0.25.1 `fused_moe.py` (`fused_experts_impl`, `_prepare_expert_assignment`), SGLang 0.5.23 `fused_moe.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gemmpipe.core.data import Build, Device, Knobs, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.family.moe import require_experts
from gemmpipe.kernels.fmoe._launch_plan import (
    FP32,
    INT,
    LaunchStep,
    activate_step,
    histogram_bins,
    scales_per_row,
    total_step,
)
from gemmpipe.launch.workspace import TensorShape
from gemmpipe.templates.params import AMD_KNOBS, int_knob, tile_constants
from gemmpipe.templates.tiled import ceil_div, stage_knobs

MODULE = "gemmpipe.kernels.fmoe._engine_kernel"
PRODUCT = "engine_experts"
_MAX_MOE_SUM_TOPK = 4
_NAIVE_FACTOR = 4
"""vLLM does not sort where each expert has a pair in `_NAIVE_FACTOR` tokens at most: pairs * 4 <= experts."""


@dataclass(frozen=True, kw_only=True)
class EngineForm:
    """The differences between the engines' `fused_experts`."""

    label: str
    """`vllm` or `sglang`: the backend and the format."""
    naive: bool
    """True if few pairs are multiplied unsorted, one per tile."""
    even_k: bool
    """True if the end of K is masked only when K tiles do not divide it."""
    clamps: bool
    """True if K tiles are cut to a group of scales; without, wider ones give wrong results."""
    apart: bool
    """True if the second product may have a configuration of its own."""


VLLM = EngineForm(label="vllm", naive=True, even_k=False, clamps=True, apart=False)
SGLANG = EngineForm(label="sglang", naive=False, even_k=True, clamps=False, apart=True)


def exact_build(step: LaunchStep, build: Build) -> Build:
    """The build of a product as Triton specialises the engine's call, in which GROUP_SIZE_M is a constant.

    Other launches are ours: engines have libraries in their place.
    """
    if step.kernel != PRODUCT:
        return build
    constants: dict[str, Scalar] = {name: 1 for name, value in step.integers.items() if value == 1}
    constants["group_m"] = step.integers["group_m"]
    pointers = [name for name in build.aligned if name not in step.integers]
    divisible = [name for name, value in step.integers.items() if value % 16 == 0 and name not in constants]
    return replace(
        build,
        signature=tuple((name, "constexpr" if name in constants else kind) for name, kind in build.signature),
        constants=(*build.constants, *constants.items()),
        aligned=(*pointers, *divisible),
    )


def is_naive(form: EngineForm, spec: GemmSpec) -> bool:
    """True if the engine leaves the pairs of this call unsorted."""
    experts = require_experts(spec)
    return form.naive and spec.m * experts.topk * _NAIVE_FACTOR <= experts.count


def engine_scratch(spec: GemmSpec, knobs: Knobs) -> dict[str, TensorShape]:
    """(shape, dtype) of the tensors between the launches, by the names that the steps use."""
    experts = require_experts(spec)
    block_m, pairs = int_knob(knobs, "BLOCK_SIZE_M"), spec.m * experts.topk
    blocks = engine_m_tiles(spec, block_m)
    found: dict[str, TensorShape] = {
        "pairs": ((blocks * block_m,), INT),
        "owners": ((blocks,), INT),
        "padded": ((1,), INT),
        "counts": ((histogram_bins(spec),), INT),
        "next": ((histogram_bins(spec),), INT),
        "wide": ((pairs, experts.w1_rows), spec.x_dtype),
        "inner": ((pairs, experts.inner), spec.x_dtype),
        "parts": ((pairs, spec.n), spec.out_dtype),
    }
    if experts.quantised:
        found["q"] = ((spec.m, spec.k), spec.w_dtype)
        found["q_scale"] = ((spec.m, scales_per_row(experts.quantised, spec.k)), FP32)
        found["inner_q"] = ((pairs, experts.inner), spec.w_dtype)
        found["inner_q_scale"] = ((pairs, scales_per_row(experts.quantised, experts.inner)), FP32)
    return found


def engine_launch_steps(
    form: EngineForm, spec: GemmSpec, knobs: Knobs, device: Device, *, interpreted: bool
) -> tuple[LaunchStep, ...]:
    """The launches in the engine's order; `interpreted`: for Triton's interpreter, with bf16 and fp8 corrected."""
    experts = require_experts(spec)
    quantised, pairs = experts.quantised, spec.m * experts.topk
    found: list[LaunchStep] = []
    x, inner = ("q", "inner_q") if quantised else ("x", "inner")
    if quantised:
        found.append(activate_step(spec, quantised, "x", "q", (spec.m, spec.k), "none", False, interpreted))
    found += (
        [_count_step(pairs * int_knob(knobs, "BLOCK_SIZE_M"))] if is_naive(form, spec) else _sort_steps(spec, knobs)
    )
    found.append(_product_step(form, spec, knobs, 1, x, device, interpreted))
    found.append(
        activate_step(
            spec, None, "wide", "inner", (pairs, experts.inner), experts.activation, experts.gated, interpreted
        )
    )
    if quantised:
        sizes = (pairs, experts.inner)
        found.append(activate_step(spec, quantised, "inner", "inner_q", sizes, "none", False, interpreted))
    found.append(_product_step(form, spec, knobs, 2, inner, device, interpreted))
    if not sums_in_torch(spec):
        found.append(total_step(spec, interpreted))
    return tuple(found)


def sums_in_torch(spec: GemmSpec) -> bool:
    """True if the engines add up a row's parts with torch.sum: their own kernel takes two to four (`moe_sum`)."""
    return require_experts(spec).topk > _MAX_MOE_SUM_TOPK


def _sort_steps(spec: GemmSpec, knobs: Knobs) -> list[LaunchStep]:
    """Sort pairs by expert, as `moe_align_block_size` does: fill, count, begin each expert's rows, scatter."""
    experts = require_experts(spec)
    pairs, block_m = spec.m * experts.topk, int_knob(knobs, "BLOCK_SIZE_M")
    rows, bins = engine_m_tiles(spec, block_m) * block_m, histogram_bins(spec)
    sizes = {"pairs": pairs, "experts": experts.count}
    return [
        LaunchStep(
            kernel="fill_pairs",
            module=MODULE,
            tensors={"pairs_ptr": "pairs", "counts_ptr": "counts"},
            integers={"rows": rows, "value": pairs},
            constants={"CHUNK": 1024, "BINS": bins},
            grid=(ceil_div(rows, 1024), 1, 1),
        ),
        LaunchStep(
            kernel="count_pairs",
            module=MODULE,
            tensors={"ids_ptr": "ids", "counts_ptr": "counts"},
            integers=sizes,
            constants={"CHUNK": 256},
            grid=(ceil_div(pairs, 256), 1, 1),
        ),
        LaunchStep(
            kernel="begin_experts",
            module=MODULE,
            tensors={"counts_ptr": "counts", "next_ptr": "next", "owners_ptr": "owners", "padded_ptr": "padded"},
            integers={"experts": experts.count},
            constants={"BLOCK_SIZE_M": block_m, "BINS": bins},
            grid=(1, 1, 1),
        ),
        LaunchStep(
            kernel="scatter_pairs",
            module=MODULE,
            tensors={"ids_ptr": "ids", "next_ptr": "next", "pairs_ptr": "pairs"},
            integers=sizes,
            constants={"CHUNK": 256},
            grid=(ceil_div(pairs, 256), 1, 1),
        ),
    ]


def _count_step(rows: int) -> LaunchStep:
    return LaunchStep(
        kernel="set_count",
        module=MODULE,
        tensors={"count_ptr": "padded"},
        integers={"count": rows},
        constants={},
        grid=(1, 1, 1),
        options={"num_warps": 1},
    )


def _product_step(
    form: EngineForm, spec: GemmSpec, knobs: Knobs, stage: int, x: str, device: Device, interpreted: bool
) -> LaunchStep:
    experts, own = require_experts(spec), stage_knobs(knobs, stage)
    naive, block_m = is_naive(form, spec), int_knob(own, "BLOCK_SIZE_M")
    n, k = (experts.w1_rows, spec.k) if stage == 1 else (spec.n, experts.inner)
    pairs = spec.m * experts.topk
    rows = pairs * block_m if naive else engine_rows(spec, block_m)
    shares = (stage == 1) == experts.weight_first
    granularity = spec.w_scale.granularity if spec.w_scale else "none"
    group = spec.w_scale.block[1] if spec.w_scale and granularity == "block" else 1
    return LaunchStep(
        kernel=PRODUCT,
        module=MODULE,
        tensors=_tensors(spec, stage, x, naive=naive, shares=shares),
        integers={
            "N": n,
            "K": k,
            "rows": rows,
            "pairs": pairs,
            "x_stride": k,
            "w_expert_stride": n * k,
            "w_stride": k,
            "out_stride": n,
            **_scale_strides(granularity, n, k, group),
            "group_m": int_knob(own, "GROUP_SIZE_M"),
        },
        constants={
            **tile_constants(own),
            "TOPK": experts.topk if stage == 1 else 1,
            "SCALES": granularity,
            "GROUP": group,
            "SWAP_AB": swaps_ab(spec, own, device),
            "NAIVE": naive,
            "EVEN_K": form.even_k and k % int_knob(own, "BLOCK_SIZE_K") == 0,
            "INTERPRETED": interpreted,
        },
        grid=(ceil_div(rows, block_m) * ceil_div(n, int_knob(own, "BLOCK_SIZE_N")), 1, 1),
        options={name: own[name] for name in ("num_warps", "num_stages", *AMD_KNOBS) if name in own},
    )


def _scale_strides(granularity: str, n: int, k: int, group: int) -> dict[str, int]:
    """Strides of x's scales by row, and of w's by expert and by row of scales; 0 without scales, as engines pass it."""
    if granularity == "block":
        groups = ceil_div(k, group)
        return {
            "x_scale_stride": groups,
            "w_scale_expert_stride": ceil_div(n, group) * groups,
            "w_scale_stride": groups,
        }
    by_row = int(granularity == "row")
    return {"x_scale_stride": by_row, "w_scale_expert_stride": n * by_row, "w_scale_stride": by_row}


def _tensors(spec: GemmSpec, stage: int, x: str, *, naive: bool, shares: bool) -> Mapping[str, str | None]:
    scaled = spec.w_scale is not None
    w, out = ("w", "wide") if stage == 1 else ("w2", "parts")
    return {
        "x_ptr": x,
        "w_ptr": w,
        "out_ptr": out,
        "x_scale_ptr": f"{x}_scale" if scaled else None,
        "w_scale_ptr": f"{w}_scale" if scaled else None,
        "shares_ptr": "shares" if shares else None,
        "pairs_ptr": None if naive else "pairs",
        "owners_ptr": "ids" if naive else "owners",
        "padded_ptr": "padded",
    }


def engine_rows(spec: GemmSpec, block_m: int) -> int:
    """Padded rows for which the engines launch tiles: the most that a routing can make (`moe_align_block_size`)."""
    experts = require_experts(spec)
    pairs = spec.m * experts.topk
    rows = pairs + experts.count * (block_m - 1)
    return min(pairs * block_m, rows) if pairs < experts.count else rows


def engine_m_tiles(spec: GemmSpec, block_m: int) -> int:
    """Tiles along M that the engines launch."""
    return ceil_div(engine_rows(spec, block_m), block_m)


def swaps_ab(spec: GemmSpec, knobs: Knobs, device: Device) -> bool:
    """True if the engines put the weight on the wide side: fp8 on Hopper, few rows and 64 columns or more."""
    return (
        spec.w_dtype.startswith("float8")
        and device.gfx == "sm_90"
        and int_knob(knobs, "BLOCK_SIZE_M") < 64
        and int_knob(knobs, "BLOCK_SIZE_N") >= 64
    )
