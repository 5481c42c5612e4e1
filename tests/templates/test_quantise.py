"""The quantiser of activations, under Triton's interpreter and compiled; candidates that quantise before a product."""

from dataclasses import replace

import pytest
import torch
from interpreter_process import INTERPRETED, Interpreter

from gemmpipe.backends.quantised_library import QuantisedLibrary
from gemmpipe.core.device import arch_device
from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.family import GemmSpec, Inputs, KernelDefaults, Launch, Prepared, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch.build import compile_build
from gemmpipe.launch.launch import KernelImplementation, KernelLaunch
from gemmpipe.templates.quantise import (
    QuantisedFirst,
    QuantisedInputs,
    quantised_spec,
    quantiser_build,
    weight_only_violation,
)

H200 = arch_device("sm_90")
FAMILY = load_family("linear_fp8_blockscale")
CASES = [
    {"mk": [1, 128], "x": "bfloat16", "w": "float8_e4m3fn", "gfx": "sm_90", "order": ROW},
    {"mk": [5, 333], "x": "float16", "w": "float8_e4m3fn", "gfx": "sm_90", "order": COLUMN},
    {"mk": [33, 2176], "x": "bfloat16", "w": "float8_e4m3fnuz", "gfx": "gfx942", "order": ROW},
    {"mk": [4, 1025], "x": "bfloat16", "w": "float8_e4m3fn", "gfx": "sm_90", "order": COLUMN},
    {"mk": [5, 700], "x": "bfloat16", "w": "float8_e4m3fn", "gfx": "sm_90", "order": ROW, "by_row": True},
]


def spec_of(m: int, n: int = 512, k: int = 1024, gfx: str = "sm_90") -> GemmSpec:
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    return FAMILY.spec(make_problem(FAMILY, {"M": m, "N": n, "K": k}, defaults, gfx, "case"))


@pytest.mark.parametrize("case", CASES)
@INTERPRETED
def test_quantises_as_torch_does(interpreter: Interpreter, case: dict) -> None:
    """A quotient in fp32 instead of a product with the reciprocal moves a value across a tie now and then."""
    found = interpreter.run("quantise", case)
    assert found["scales"]
    assert found["order"] == (ROW if case["mk"][0] == 1 else case["order"])
    assert found["different"] < 3e-3
    assert found["worst"] <= 0.13  # one step of a format with three bits of mantissa


@pytest.mark.compile
@pytest.mark.parametrize("gfx", ["sm_90", "sm_100", "gfx942", "gfx950"])
def test_compiles_for_every_architecture(gfx: str) -> None:
    build = quantiser_build(spec_of(7, k=1100, gfx=gfx), arch_device(gfx))
    facts = compile_build(build, arch_device(gfx))
    assert not facts.error
    assert not facts.spills


def test_the_quantiser_reads_the_product_before_x_is_quantised() -> None:
    """A build for x in fp8 would read 16-bit memory as fp8."""
    with pytest.raises(ValueError, match="x in 16 bits"):
        quantiser_build(quantised_spec(spec_of(16)), H200)


def test_other_operands_are_no_candidates() -> None:
    spec = spec_of(16)
    assert weight_only_violation(spec) is None
    product = load_family("a8w8_blockscale")
    scaled = quantised_spec(spec)
    for other in (
        scaled,
        replace(spec, w_scale=None),
        replace(spec, out_dtype="float32"),
        replace(spec, w_dtype="int8"),
    ):
        assert weight_only_violation(other)
        for implementation in FAMILY.implementations:
            knobs = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_warps": 4, "num_stages": 3}
            knobs = implementation.normalise(spec, knobs, H200)
            assert "operands: " in str(implementation.unsupported_reason(other, knobs, H200))
        assert list(QuantisedLibrary().configs(other, H200, None)) == []  # type: ignore[arg-type]
    own = {i.label for i in product.implementations} - {"streamed"}  # fused_streamed takes its place
    assert own < {i.label for i in FAMILY.implementations}


@pytest.mark.parametrize(("m", "order"), [(1, ROW), (2, COLUMN), (64, COLUMN)])
def test_scales_are_written_in_the_order_that_the_product_reads(m: int, order: str) -> None:
    for implementation in FAMILY.implementations:
        if isinstance(implementation, QuantisedFirst):
            assert implementation._product_spec(spec_of(m)).x_scale_orders == (order,)


def test_a_library_multiplies_whole_groups_of_rows() -> None:
    """`scaled_mm` refuses M = 1; padded to four rows it is a baseline for every M."""
    library = QuantisedLibrary()
    (knobs, *_) = library.configs(spec_of(1), H200, None)  # type: ignore[arg-type]
    for m in (1, 2, 3, 5, 64):
        assert library.unsupported_reason(spec_of(m), library.normalise(spec_of(m), knobs, H200), H200) is None


def test_only_the_product_after_the_quantiser_overlaps_the_launch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Foreign kernels let nothing start early, and a launch that could costs time after them."""
    seen: list[bool] = []

    class Recorded(KernelImplementation):
        label = "recorded"

        def configs(self, *arguments: object) -> tuple[()]:
            return ()

        def unsupported_reason(self, *arguments: object) -> None:
            return None

        def launch(self, *arguments: object) -> KernelLaunch:
            raise NotImplementedError

        def bind(self, *arguments: object) -> Launch:
            seen.append(self.launch_pdl)
            return torch.Tensor

    def quantised(spec: GemmSpec, device: object, x: object, order: str) -> QuantisedInputs:
        return QuantisedInputs(inputs=Inputs(x=torch.zeros(1)), run=list)

    monkeypatch.setattr("gemmpipe.templates.quantise.quantised_inputs", quantised)
    first = QuantisedFirst(product=Recorded())
    operands = Inputs(x=torch.zeros(1)), Prepared(weights=Weights(w=torch.zeros(1))), torch.zeros(1)
    first.bind(spec_of(16), {}, H200, *operands)
    assert seen == [True]
    for family in ("a8w8_blockscale", "a8w8", "a16w16"):
        own = [each for each in load_family(family).implementations if isinstance(each, KernelImplementation)]
        assert own
        assert not any(each.launch_pdl for each in own)
