"""The library paths on a CPU, against the reference."""

import pytest
import torch

from gemmpipe.backends.aten import Torch
from gemmpipe.backends.onednn import OneDnn
from gemmpipe.backends.own import Own
from gemmpipe.backends.scaled_mm import ScaledMm
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.family import Family, GemmSpec, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.family.space import Space

NO_SPACE = Space(axes={}, when=(), pinned=())
CASES = [
    ("a16w16", {"bias": True}),
    ("a16w16", {"dtype": "float16", "out_dtype": "float32", "bias": True}),
    ("a16w16", {"dtype": "float8_e4m3fn", "bias": True}),
    ("a8w8_blockscale", {}),
    ("a8w8_blockscale", {"out_dtype": "float32"}),
]


def spec_of(name: str, options: dict[str, object], m: int, n: int, k: int) -> tuple[Family, GemmSpec]:
    family = load_family(name)
    defaults = KernelDefaults(**{"dtype": None, "out_dtype": None, "bias": None, **options})  # type: ignore[arg-type]
    return family, family.spec(make_problem(family, {"M": m, "N": n, "K": k}, defaults, "cpu_avx2", "test"))


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("backend", [Torch(), OneDnn()], ids=["torch", "onednn"])
def test_every_fit_method_is_right(backend: Torch | OneDnn, name: str, options: dict[str, object]) -> None:
    family, spec = spec_of(name, options, 5, 144, 400)
    device, generator = cpu_device(), torch.Generator().manual_seed(5)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    reference = family.reference(spec, inputs, weights)
    fit = [k for k in backend.configs(spec, device, NO_SPACE) if backend.unsupported_reason(spec, k, device) is None]
    assert fit
    for knobs in fit:
        out = torch.full((5, 144), float("nan"), dtype=getattr(torch, spec.out_dtype))
        prepared = backend.prepare(spec, weights, knobs)
        result = backend.bind(spec, knobs, device, inputs, prepared, out)()
        assert error_ratio(result, reference, *family.tolerance(spec)) < 0.02, knobs
        keeps = str(knobs["method"]).endswith(("_copy", "_packed"))
        replaces = knobs["method"] == f"{spec.w_dtype}_packed"
        assert (prepared.extra_bytes > 0) == (keeps and not replaces), knobs


def test_scaled_mm_pads_the_weight_scales_as_cublaslt_reads_them() -> None:
    family, spec = spec_of("a8w8_blockscale", {}, 64, 256, 640)
    weights = family.make_weights(spec, torch.Generator().manual_seed(5))
    prepared = ScaledMm().prepare(spec, weights, {"use_fast_accum": False})
    assert isinstance(prepared.extra, torch.Tensor)
    assert prepared.extra.shape == (8, 2)
    assert prepared.extra.stride() == (1, 8)
    assert torch.equal(prepared.extra[:5].t(), weights.w_scale)
    assert prepared.extra_bytes == 0


@pytest.mark.usefixtures("scaled_on_cpu")
def test_scaled_mm_is_right_with_one_scale_per_operand() -> None:
    """Its CPU fallback computes the same, slowly: enough to check the arguments."""
    backend, device = ScaledMm(), arch_device("sm_90")
    family, spec = spec_of("a16w16", {"dtype": "float8_e4m3fn", "bias": True}, 16, 64, 128)
    generator = torch.Generator().manual_seed(5)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    out = torch.empty(16, 64, dtype=torch.bfloat16)
    prepared = backend.prepare(spec, weights, {"use_fast_accum": False})
    backend.bind(spec, {"use_fast_accum": False}, device, inputs, prepared, out)()
    assert error_ratio(out, family.reference(spec, inputs, weights), *family.tolerance(spec)) < 0.01


@pytest.mark.parametrize(
    ("m", "n", "k", "gfx", "rule"),
    [
        (7, 256, 640, "sm_90", "alignment"),
        (8, 250, 640, "sm_90", "alignment"),
        (8, 256, 640, "sm_100", "block scales"),
        (8, 256, 640, "gfx942", "fp8 format"),
    ],
)
def test_scaled_mm_names_the_rule(m: int, n: int, k: int, gfx: str, rule: str) -> None:
    _, spec = spec_of("a8w8_blockscale", {}, m, n, k)
    assert str(ScaledMm().unsupported_reason(spec, {"use_fast_accum": False}, arch_device(gfx))).split(":")[0] == rule


def test_own_finds_kernels_by_their_label() -> None:
    family = load_family("a16w16")
    for label in {implementation.label for implementation in family.implementations}:
        found = Own(label=label).implementations(family)
        assert found
        assert {implementation.label for implementation in found} == {label}
    assert Own(label="unknown").implementations(family) == ()
    assert Torch().implementations(family) == (Torch(),)
