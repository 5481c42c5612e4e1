"""DeepGEMM's tiles and FlashInfer's and vLLM's products against the reference, on a GPU with the packages."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from gemmpipe.backends import NO_SPACE, library_backends
from gemmpipe.backends.deepgemm_build import KERNEL
from gemmpipe.core.device import gpu_device, gpu_kind
from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.launch.build import compile_build

pytestmark = pytest.mark.gpu
LABELS = ("deepgemm", "flashinfer", "vllm_cutlass", "vllm", "sglang", "vllm_function", "sglang_function")


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("m", [1, 6, 64, 200])
@pytest.mark.parametrize(
    ("name", "order"),
    [("a8w8_blockscale", ROW), ("a8w8_blockscale", COLUMN), ("linear_fp8_blockscale", ROW), ("linear_fp8_row", ROW)],
)
def test_peers_compute_the_product(label: str, m: int, name: str, order: str) -> None:
    if gpu_kind() != "cuda":
        pytest.skip("no NVIDIA GPU")
    device, family, backend = gpu_device(0), load_family(name), library_backends()[label]
    if reason := backend.unavailable(device):
        pytest.skip(reason)
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": m, "N": 1536, "K": 1152}, defaults, device.gfx, "test"))
    if spec.x_scale is not None:
        spec = replace(spec, x_scale=replace(spec.x_scale, order=order))
    generator = torch.Generator(device=device.torch_name).manual_seed(1)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    reference, tolerance = family.reference(spec, inputs, weights), family.tolerance(spec)
    for knobs in backend.configs(spec, device, NO_SPACE):
        if backend.unsupported_reason(spec, knobs, device):
            continue
        out = torch.full(spec.out_shape, torch.nan, dtype=torch.bfloat16, device=device.torch_name)
        prepared = backend.prepare(spec, weights, knobs)
        result = backend.bind(spec, knobs, device, inputs, prepared, out)()
        assert error_ratio(result, reference, *tolerance) == 0, knobs


@pytest.mark.parametrize("dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("token", [1, 40, 700])
def test_an_engines_experts_compute_the_mixture(token: int, dtype: str | None) -> None:
    if gpu_kind() != "cuda":
        pytest.skip("no NVIDIA GPU")
    device, family, backend = gpu_device(0), load_family("fmoe"), library_backends()["vllm_function"]
    if reason := backend.unavailable(device):
        pytest.skip(reason)
    defaults = KernelDefaults(dtype=dtype, out_dtype=None, bias=None)
    key = {"token": token, "model_dim": 512, "inter_dim": 256, "expert": 16, "topk": 4}
    spec = family.spec(make_problem(family, key, defaults, device.gfx, "test"))
    generator = torch.Generator(device=device.torch_name).manual_seed(2)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    out = torch.full(spec.out_shape, torch.nan, dtype=torch.bfloat16, device=device.torch_name)
    result = backend.bind(spec, {}, device, inputs, backend.prepare(spec, weights, {}), out)()
    # 1.2 % of the elements of one row were beyond the tolerance of fp8 on an H200.
    assert error_ratio(result, family.reference(spec, inputs, weights), *family.tolerance(spec)) < 0.04


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("token", [1, 40, 700, 1031])
def test_deepgemms_grouped_products_compute_the_mixture(token: int, away: bool) -> None:
    """`away`: a part of the pairs is of experts of other ranks, so that three experts here have no row."""
    if gpu_kind() != "cuda":
        pytest.skip("no NVIDIA GPU")
    device, family = gpu_device(0), load_family("fmoe")
    (experts,) = library_backends()["deepgemm"].implementations(family)
    if reason := experts.unavailable(device):
        pytest.skip(reason)
    defaults = KernelDefaults(dtype="float8_e4m3fn", out_dtype=None, bias=None)
    key = {"token": token, "model_dim": 512, "inter_dim": 384, "expert": 12, "topk": 3}
    spec = family.spec(make_problem(family, key, defaults, device.gfx, "test"))
    generator = torch.Generator(device=device.torch_name).manual_seed(3)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    assert inputs.topk_ids is not None
    assert inputs.topk_weights is not None
    ids = torch.where(inputs.topk_ids % 4 == 1, -1, inputs.topk_ids) if away else inputs.topk_ids
    known = ids >= 0
    here = replace(inputs, topk_ids=ids * known, topk_weights=inputs.topk_weights * known)
    reference, tolerance = family.reference(spec, here, weights), family.tolerance(spec)
    candidates = list(experts.configs(spec, device, NO_SPACE))
    assert len(candidates) >= 4
    compiled = dict.fromkeys(build for knobs in candidates for build in experts.builds(spec, knobs, device))
    with ThreadPoolExecutor() as pool:  # nvcc takes seconds for each of DeepGEMM's kernels
        assert all(pool.map(lambda build: compile_build(build, device), (b for b in compiled if b.kernel == KERNEL)))
    for knobs in candidates:
        assert experts.unsupported_reason(spec, knobs, device) is None
        out = torch.full(spec.out_shape, torch.nan, dtype=torch.bfloat16, device=device.torch_name)
        run = experts.bind(
            spec, knobs, device, replace(inputs, topk_ids=ids), experts.prepare(spec, weights, knobs), out
        )
        for _ in range(2):
            assert error_ratio(run().clone(), reference.clone(), *tolerance) < 0.04, knobs
            out.fill_(torch.nan)
