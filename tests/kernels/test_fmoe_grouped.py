"""Fused experts over sorted rows, without a GPU: launches around the product, constraints, builds for Hopper."""

import re
from collections.abc import Mapping

import pytest
import torch
from interpreter_process import INTERPRETED, Interpreter
from moe_problems import FMOE, NAMES, QWEN, shipped_space, spec_of
from pairwise import few

from gemmpipe.core.data import Build, Candidate, Scalar
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.family import GemmSpec, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.kernels.fmoe._gluon import GroupedExperts
from gemmpipe.kernels.fmoe._grouped_launch_plan import KERNELS, TmaLaunchStep, grouped_launch_steps, unsplit_knobs
from gemmpipe.launch.build import compile_build, compile_kernel
from gemmpipe.templates.hopper.constraints import hopper_shared_bytes

FUSED: dict[str, Scalar] = {"FUSED_ACT": True}
GATHERED: dict[str, Scalar] = {"GATHER_ROWS": True}
SUMMED: dict[str, Scalar] = {"FUSED_SUM": True}
PINGPONG: dict[str, Scalar] = {"PINGPONG": True, "BLOCK_SIZE_N_2": 128, "num_stages_2": 4}
HOPPER, KERNEL = arch_device("sm_90"), GroupedExperts()


def _case(sizes: tuple[int, ...], dtype: str | None = None, **case: object) -> dict[str, object]:
    key = dict(zip(NAMES, sizes, strict=True)) | case.pop("key", {})  # type: ignore[operator]
    return {"key": key, "dtype": dtype, **case}


ON_A_CPU = [
    _case((16, 64, 64, 4, 2)),
    _case((77, 64, 48, 5, 3), more=FUSED),
    _case((77, 64, 48, 5, 3), more={**FUSED, "BLOCK_SIZE_M": 128}, key={"doweight_stage1": 1}),
    _case((77, 64, 48, 5, 3), "float16", key={"doweight_stage1": 1, "use_g1u1": 0, "act_type": "gelu"}),
    _case((9, 256, 128, 4, 2), "fp8"),
    _case((9, 208, 128, 4, 2), "fp8", more={**FUSED, "BLOCK_SIZE_N": 256}),
    _case((17, 256, 256, 6, 3), "fp8", more={**FUSED, "BLOCK_SIZE_N": 256}, key={"doweight_stage1": 1}),
    _case((9, 208, 192, 4, 2), "fp8", key={"doweight_stage1": 1}),
    _case((9, 240, 176, 4, 2), "fp8", more=FUSED, key={"q_type": "per_token"}),
    _case((7, 240, 176, 40, 4), "fp8", key={"q_type": "per_token", "doweight_stage1": 1}),
    _case((33, 128, 64, 8, 8), "fp8", away=True),
    _case((77, 64, 48, 5, 3), more=FUSED | GATHERED),
    _case((33, 128, 64, 8, 8), "fp8", away=True, more=GATHERED),
    _case((9, 256, 128, 4, 2), "fp8", more={**FUSED, **GATHERED, "BLOCK_SIZE_N": 256}),
    _case((77, 64, 48, 5, 3), more=FUSED | SUMMED),
    _case((33, 128, 64, 8, 8), "fp8", away=True, more=SUMMED),
    _case((9, 240, 176, 4, 2), "fp8", more=FUSED | SUMMED, key={"q_type": "per_token", "doweight_stage1": 1}),
    _case((9, 256, 128, 4, 2), "fp8", more={**FUSED, **GATHERED, **SUMMED, **PINGPONG, "BLOCK_SIZE_N": 256}),
    # 133 pairs in 5 chunks, 195 in 7.
    _case((65, 16, 16, 9, 4), away=True),
    _case((19, 16, 16, 9, 7), away=True, chunks=[64, 32]),
    _case((65, 16, 16, 70, 3), chunks=[64, 32]),
    _case((65, 256, 128, 9, 4), "fp8", away=True, more=GATHERED, chunks=[64, 32]),
]
# Enough pairs for the chunks of a GPU.
MANY_PAIRS = [_case((1025, 16, 16, 9, 4), away=True), _case((2051, 16, 16, 70, 3))]


def matches(interpreter: Interpreter, case: dict[str, object]) -> None:
    error = interpreter.run("grouped", case)
    assert error < (0.04 if case["dtype"] == "fp8" else 1e-3), error


@INTERPRETED
@pytest.mark.parametrize("case", few(ON_A_CPU, 0, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16, 17, 19, 21))
def test_launches_around_the_product_match_the_reference(interpreter: Interpreter, case: dict[str, object]) -> None:
    matches(interpreter, case)


@INTERPRETED
@pytest.mark.slow
@pytest.mark.parametrize("case", MANY_PAIRS, ids=["counted", "counted of many experts"])
def test_launches_around_a_product_of_thousands_of_pairs_match_the_reference(
    interpreter: Interpreter, case: dict[str, object]
) -> None:
    matches(interpreter, case)


def knobs_for(m: int, n: int, stages: int, spec: GemmSpec, **more: Scalar) -> dict[str, Scalar]:
    deep = 128 if spec.w_dtype.startswith("float8") else 64
    tile: dict[str, Scalar] = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": deep, "num_stages": stages}
    return {"kernel_type": "warp_specialised", **tile, "GROUP_SIZE_M": 1, **more}


def test_equivalent_knobs_are_one_candidate() -> None:
    spec = spec_of(QWEN)
    plain = KERNEL.normalise(spec, knobs_for(64, 128, 6, spec), HOPPER)
    same = {"BLOCK_SIZE_N_2": 128, "num_stages_2": None, "FUSED_ACT": False, "num_warps": 8, "kpack": 2}
    assert KERNEL.normalise(spec, {**plain, **same}, HOPPER) == plain
    apart = KERNEL.normalise(spec, {**plain, "BLOCK_SIZE_N_2": 256, **FUSED}, HOPPER)
    assert KERNEL.normalise(spec, apart, HOPPER) == apart
    names = [KERNEL.kernel_name(knobs).split("@")[0] for knobs in (plain, apart)]
    assert names == ["grouped", "grouped_fused_apart"]
    pingpong = KERNEL.normalise(spec, {**plain, **PINGPONG}, HOPPER)
    assert KERNEL.kernel_name(pingpong).startswith("grouped_pingpong_apart@")
    summed = KERNEL.normalise(spec, {**plain, **SUMMED}, HOPPER)
    assert KERNEL.kernel_name(summed).startswith("grouped_summed@")
    assert KERNEL.normalise(spec, {**plain, "FUSED_SUM": False}, HOPPER) == plain
    # Without 16 blocks, groups of 32 and of 16 have one order.
    few_blocks, many = spec_of((1, 2048, 768, 16, 8)), spec_of(QWEN)
    assert KERNEL.normalise(few_blocks, {**plain, "GROUP_SIZE_M_2": 4096}, HOPPER)["GROUP_SIZE_M_2"] == 8
    assert KERNEL.normalise(many, {**plain, "GROUP_SIZE_M_2": 32}, HOPPER)["GROUP_SIZE_M_2"] == 32
    assert KERNEL.normalise(few_blocks, {**plain, "GROUP_SIZE_M": 64, "GROUP_SIZE_M_2": 64}, HOPPER) == {
        **plain,
        "GROUP_SIZE_M": 64,
    }
    assert KERNEL.normalise(spec, {**plain, "BLOCK_SIZE_M": 0, "GROUP_SIZE_M_2": 8}, HOPPER)["GROUP_SIZE_M_2"] == 8
    # Blocks of 128 rows have no such product.
    assert "PINGPONG" not in KERNEL.normalise(spec, {**plain, **PINGPONG, "BLOCK_SIZE_M": 128}, HOPPER)


@pytest.mark.parametrize(
    ("topk", "options", "kept"), [(8, {}, True), (8, {"warn_only": True}, True), (8, None, False), (2, None, True)]
)
def test_sums_have_a_fixed_order_where_torch_demands_it(topk: int, options: dict[str, bool] | None, kept: bool) -> None:
    spec, knobs = spec_of((*QWEN[:4], topk)), {"BLOCK_SIZE_M": 64, **SUMMED}
    if options != {}:
        torch.use_deterministic_algorithms(True, **options or {})
    try:
        assert KERNEL.called_knobs(spec, knobs) == (knobs if kept else {"BLOCK_SIZE_M": 64})
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("dtype", "model_dim", "key", "gathers"),
    [
        (None, 2048, {}, True),
        ("fp8", 2048, {}, True),
        (None, 2048 + 8, {}, False),  # no whole K blocks
        (None, 2048, {"doweight_stage1": 1}, False),
        ("fp8", 2048, {"q_type": "per_token"}, False),
    ],
)
def test_rows_are_gathered_where_the_loader_can(
    dtype: str | None, model_dim: int, key: dict[str, object], gathers: bool
) -> None:
    spec = spec_of((64, model_dim, *QWEN[2:]), dtype=dtype, key=key)
    knobs = KERNEL.normalise(spec, knobs_for(64, 128, 6, spec, **GATHERED), HOPPER)
    assert ("GATHER_ROWS" in knobs) is gathers
    assert ("gathered" in KERNEL.kernel_name(knobs)) is gathers
    names = [step.kernel for step in grouped_launch_steps(spec, knobs, HOPPER, interpreted=False)]
    assert ("sorted_rows" in names[:-4]) is not gathers


@pytest.mark.parametrize(
    ("dtype", "sizes", "changes", "rule"),
    [
        (None, QWEN, {"BLOCK_SIZE_M": 32}, "tile"),
        (None, QWEN, {"BLOCK_SIZE_K": 128}, "tile"),
        (None, QWEN, {"BLOCK_SIZE_N": 512}, "registers"),
        (None, QWEN, {"BLOCK_SIZE_N_2": 16}, "registers"),
        (None, QWEN, {"num_stages": 12}, "shared memory"),
        (None, QWEN, {"num_stages_2": 12}, "shared memory"),
        (None, QWEN, {"num_warps_2": 8}, "second stage"),
        (None, QWEN, {**PINGPONG, "num_stages_2": 9}, "shared memory"),
        ("fp8", QWEN, {**PINGPONG, "BLOCK_SIZE_N_2": 256}, "registers"),
        (None, (64, 2044, 768, 128, 8), {}, "alignment"),
        (None, (64, 2040, 768, 128, 8), SUMMED, "fused sum"),
        (None, (1_200_000, 2048, 768, 128, 8), SUMMED, "fused sum"),
        (None, (64, 2048, 764, 128, 8), {"FUSED_ACT": True}, "alignment"),
        ("fp8", (64, 2048, 760, 128, 8), {}, "alignment"),
        ("fp8", QWEN, {"FUSED_ACT": True}, "fused activation"),
        ("fp8", (64, 2048, 704, 128, 8), {"FUSED_ACT": True, "BLOCK_SIZE_N": 256, "num_stages": 4}, "fused activation"),
        ("fp8", QWEN, {"BLOCK_SIZE_N": 256, "BLOCK_SIZE_M": 128}, "registers"),
        ("fp8", (2**21, 2**18, 128, 2, 2), {}, "places"),
        ("fp8", (2**20, 2048, 768, 128, 8), {}, "order"),
    ],
)
def test_reasons_name_their_rule(
    dtype: str | None, sizes: tuple[int, ...], changes: dict[str, Scalar], rule: str
) -> None:
    spec = spec_of(sizes, dtype=dtype)
    fits = spec_of(QWEN, dtype=dtype)
    assert KERNEL.unsupported_reason(fits, KERNEL.normalise(fits, knobs_for(64, 128, 6, fits), HOPPER), HOPPER) is None
    reason = KERNEL.unsupported_reason(spec, {**knobs_for(64, 128, 6, spec), **changes}, HOPPER)
    assert reason is not None
    assert reason.split(":")[0] == rule
    assert "_2" not in str(changes) or rule == "second stage" or reason.endswith("(stage 2)")


@pytest.mark.parametrize("gfx", ["sm_100", "gfx942", "cpu"])
def test_is_hoppers_alone(gfx: str) -> None:
    device = cpu_device() if gfx == "cpu" else arch_device(gfx)
    spec = spec_of(QWEN)
    reason = str(KERNEL.unsupported_reason(spec, knobs_for(64, 128, 6, spec), device))
    assert reason.startswith("no GPU" if gfx == "cpu" else "architecture")


def test_is_unsupported_for_a_plain_product() -> None:
    plain = load_family("a16w16")
    options = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = plain.spec(make_problem(plain, {"M": 1, "N": 64, "K": 64}, options, "sm_90", "test"))
    assert str(KERNEL.unsupported_reason(spec, knobs_for(64, 128, 6, spec), HOPPER)).startswith("experts")


@pytest.mark.parametrize("dtype", [None, "fp8"])
@pytest.mark.parametrize("token", [1, 256, 4096])
def test_the_space_has_points_on_hopper_alone(dtype: str | None, token: int) -> None:
    space = shipped_space("fmoe")
    spec = spec_of((token, *QWEN[1:]), dtype=dtype)
    found = [KERNEL.normalise(spec, point, HOPPER) for point in KERNEL.configs(spec, HOPPER, space)]
    fit = {Candidate.of("gluon", knobs) for knobs in found if KERNEL.unsupported_reason(spec, knobs, HOPPER) is None}
    assert len(fit) > 30
    assert {c.knobs["BLOCK_SIZE_M"] for c in fit} == ({64, 128} if token == 4096 else {64})
    assert not list(KERNEL.configs(spec, arch_device("gfx942"), space))
    assert not list(KERNEL.configs(spec, HOPPER, shipped_space("fmoe_vllm")))
    for point in FMOE.implementations[0].configs(spec, HOPPER, space):
        assert point["kernel_type"] == "plain"


LAUNCHED = [
    (64, None, {}, (64, 128, 6)),
    (64, "fp8", {"q_type": "per_token"}, (64, 256, 4)),
    (4096, None, {}, (128, 256, 4)),
    (4096, "float16", {"act_type": "gelu", "doweight_stage1": 1, "use_g1u1": 0}, (128, 128, 5)),
    (4096, "fp8", {}, (64, 256, 4)),
]
NAMES_OF_CASE = ("token", "dtype", "key", "tile")


def _builds(token: int, dtype: str | None, key: dict[str, object], tile: tuple[int, int, int]) -> tuple[Build, ...]:
    spec = spec_of((token, 2048, 768, 128, 8), dtype=dtype, key=key)
    knobs = _knobs(token, dtype, key, tile)
    assert KERNEL.unsupported_reason(spec, knobs, HOPPER) is None
    return tuple(KERNEL.builds(spec, knobs, HOPPER))


def _knobs(token: int, dtype: str | None, key: dict[str, object], tile: tuple[int, int, int]) -> Mapping[str, Scalar]:
    spec = spec_of((token, 2048, 768, 128, 8), dtype=dtype, key=key)
    more = FUSED if dtype != "fp8" or key or tile[0] == 64 else {}
    return KERNEL.normalise(spec, knobs_for(*tile, spec, **more), HOPPER)


@pytest.mark.parametrize(NAMES_OF_CASE, LAUNCHED)
def test_only_few_tokens_are_ordered_by_one_launch(
    token: int, dtype: str | None, key: dict[str, object], tile: tuple[int, int, int]
) -> None:
    absent = set(KERNELS) - {build.kernel for build in _builds(token, dtype, key, tile)}
    unused = ("rank_pairs", "place_pairs") if token == 64 else ("order_pairs",)
    assert absent == {kernel for kernel in KERNELS if kernel.endswith(unused)}


@pytest.mark.slow
@pytest.mark.parametrize(
    (*NAMES_OF_CASE, "products"), few([(*case, products) for case in LAUNCHED for products in (1, 2)], 0)
)
def test_compiles_without_a_gpu_within_the_estimate(
    token: int, dtype: str | None, key: dict[str, object], tile: tuple[int, int, int], products: int
) -> None:
    """The launches around the products, and one or both of them."""
    knobs = _knobs(token, dtype, key, tile)
    own, others = [], []
    for build in _builds(token, dtype, key, tile):
        (own if build.boxes else others).append(build)
    for build in (*others, *own[:products]):
        facts = compile_build(build, HOPPER)
        assert facts.shared_bytes is not None
        assert facts.shared_bytes <= hopper_shared_bytes(unsplit_knobs(knobs, 1)) <= HOPPER.shared_bytes
        assert facts.spills is not None
        assert facts.spills < 16


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tile"), [(None, (128, 256, 4)), ("fp8", (64, 256, 4))])
def test_gathering_compiles_without_a_gpu_within_the_estimate(dtype: str | None, tile: tuple[int, int, int]) -> None:
    spec = spec_of((4096, *QWEN[1:]), dtype=dtype)
    knobs = KERNEL.normalise(spec, knobs_for(*tile, spec, **FUSED, **GATHERED), HOPPER)
    gathered = [build for build in KERNEL.builds(spec, knobs, HOPPER) if "_gathered:" in build.kernel]
    assert len(gathered) == (2 if dtype else 1)  # fp8: and the order of pairs, which quantises
    for build in gathered:
        facts = compile_build(build, HOPPER)
        assert facts.shared_bytes is not None
        assert facts.shared_bytes <= hopper_shared_bytes(unsplit_knobs(knobs, 1)) <= HOPPER.shared_bytes
        assert facts.spills is not None
        assert facts.spills < 16


@pytest.mark.parametrize("added", [False, True])
def test_only_rows_that_are_added_need_zeros(added: bool) -> None:
    """Without them the output of any size fits the arguments, and builds do not depend on it."""
    spec = spec_of((450_000, 5120, 8192, 16, 1) if not added else QWEN)
    knobs = KERNEL.normalise(spec, knobs_for(64, 128, 6, spec, **(SUMMED if added else {})), HOPPER)
    assert KERNEL.unsupported_reason(spec, knobs, HOPPER) is None
    first, second = (
        step for step in grouped_launch_steps(spec, knobs, HOPPER, interpreted=False) if isinstance(step, TmaLaunchStep)
    )
    assert (first.integers["zeroed"], first.tensors["zeroed_ptr"]) == ((spec.m * spec.n, "out") if added else (0, None))
    assert (second.integers["zeroed"], second.tensors["out"]) == (0, "out" if added else "parts")


@pytest.mark.parametrize("token", [1, 64, 256, 4096])
def test_few_rows_are_neither_copied_nor_stored(token: int) -> None:
    """Each of Qwen's 128 experts gets 16 rows of 256 tokens: blocks of 64 are mostly padding."""
    spec = spec_of((token, *QWEN[1:]))
    knobs = knobs_for(64, 128, 6, spec)
    first = next(
        step for step in grouped_launch_steps(spec, knobs, HOPPER, interpreted=False) if isinstance(step, TmaLaunchStep)
    )
    assert (first.boxes["x"][0][0], "out" in first.boxes) == ((64, True) if token == 4096 else (16, False))


@pytest.mark.slow
@pytest.mark.parametrize("token", [64, 4096])
@pytest.mark.parametrize("dtype", [None, "fp8"])
def test_pingpong_warpgroups_compile_without_a_gpu_within_the_estimate(dtype: str | None, token: int) -> None:
    spec = spec_of((token, *QWEN[1:]), dtype=dtype)
    for columns, stages in ((64, 8), (128, 4)):
        more = {**PINGPONG, "BLOCK_SIZE_N_2": columns, "num_stages_2": stages}
        knobs = KERNEL.normalise(spec, knobs_for(64, 256, 4, spec, **FUSED, **more), HOPPER)
        assert KERNEL.unsupported_reason(spec, knobs, HOPPER) is None
        (build,) = [build for build in KERNEL.builds(spec, knobs, HOPPER) if "_pingpong:" in build.kernel]
        facts = compile_build(build, HOPPER)
        assert facts.shared_bytes is not None
        assert facts.shared_bytes <= HOPPER.shared_bytes
        assert facts.spills is not None
        assert facts.spills < 16


@pytest.mark.parametrize(
    ("dtype", "token", "more"),
    few(
        [
            ("fp8", 4096, {**PINGPONG, "GROUP_SIZE_M_2": 4096}),
            (None, 4096, {}),
            ("fp8", 4096, {"BLOCK_SIZE_N_2": 256}),
            (None, 16, {"BLOCK_SIZE_N_2": 64}),
        ],
        0,
    ),
)
def test_sums_compile_to_additions_of_eight_columns(dtype: str | None, token: int, more: dict[str, Scalar]) -> None:
    spec = spec_of((token, *QWEN[1:]), dtype=dtype)
    knobs = KERNEL.normalise(spec, knobs_for(64, 256, 4, spec, **FUSED, **GATHERED, **SUMMED, **more), HOPPER)
    assert KERNEL.unsupported_reason(spec, knobs, HOPPER) is None
    build = KERNEL.builds(spec, knobs, HOPPER)[-1]
    facts = compile_build(build, HOPPER)
    assert facts.shared_bytes is not None
    assert facts.shared_bytes <= HOPPER.shared_bytes
    assert facts.spills is not None
    assert facts.spills < 16
    added = re.findall(r"(?:atom|red)\.global\S*", str(compile_kernel(build, HOPPER).asm["ptx"]))
    assert added
    assert all(each.endswith("add.noftz.v8.bf16") for each in added)
