"""Calls with `config` and `y` on a GPU: every family's own kernels, in graphs, compiled, tuned by a script."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gemmpipe
from gemmpipe.core.device import gpu_device
from gemmpipe.family import Family, GemmSpec, Inputs, KernelDefaults, Weights, load_family, shipped_families
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.runtime.fixed_config import DoesNotFit
from gemmpipe.tune import get_search_space, tune_and_save_configs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TILES = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_warps": 4, "num_stages": 3}
SIZES = {"B": 4, "M": 16, "N": 1024, "K": 2048}
SIZES |= {"token": 16, "model_dim": 1024, "inter_dim": 512, "expert": 8, "topk": 2}
Made = tuple[Family, GemmSpec, Weights, Inputs, list[torch.Tensor]]


def made(name: str) -> Made:
    family, device = load_family(name), gpu_device(0)
    values = {column.name: SIZES[column.name] for column in family.key_columns if column.name in SIZES}
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, values, defaults, device.gfx, "case"))
    generator = torch.Generator(device="cuda").manual_seed(3)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    scales = [scale for scale in (inputs.x_scale, weights.w_scale) if scale is not None]
    operands = [inputs.x, weights.w, *scales]
    if spec.experts is not None:
        operands = [inputs.x, weights.w, weights.w2, inputs.topk_weights, inputs.topk_ids]
    return family, spec, weights, inputs, operands


def config_of(name: str) -> dict[str, object]:
    small = name == "fmoe" or name.startswith(("a16w16", "batched_bf16"))
    return {**TILES, "BLOCK_SIZE_K": 64 if small else 128} | ({} if name == "fmoe" else {"NUM_KSPLIT": 2})


@pytest.mark.parametrize("name", shipped_families())
def test_a_configuration_into_y_at_once_and_in_a_graph(name: str) -> None:
    family, spec, weights, inputs, operands = made(name)
    function, config = getattr(gemmpipe.runtime, family.entry_point), config_of(name)
    reference = family.reference(spec, inputs, weights)
    with torch.inference_mode():
        y = torch.full(spec.out_shape, float("nan"), dtype=getattr(torch, spec.out_dtype), device="cuda")
        assert function(*operands, y=y, config=config) is y
        assert error_ratio(y, reference, *family.tolerance(spec)) < 0.01
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            function(*operands, y=y, config=config)
        for _ in range(3):
            y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert error_ratio(y, reference, *family.tolerance(spec)) < 0.01


def test_nothing_is_copied() -> None:
    family, spec, _, _, operands = made("a8w8_blockscale")
    function = getattr(gemmpipe.runtime, family.entry_point)
    y = torch.empty(spec.out_shape, dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode():
        function(*operands, y=y, config=config_of("a8w8_blockscale"))
        torch.cuda.synchronize()
        with torch.profiler.profile() as profile:
            function(*operands, y=y, config=config_of("a8w8_blockscale"))
            torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels


@pytest.mark.parametrize("kind", ["warp_specialised", "skinny", "sliced", "streamed"])
def test_other_kernels_by_their_kind(kind: str) -> None:
    family, spec, weights, inputs, operands = made("a16w16")
    if kind == "streamed":  # up to 8 rows
        spec, inputs = replace(spec, m=5), Inputs(x=inputs.x[:5])
        operands = [inputs.x, *operands[1:]]
    knobs = {
        "warp_specialised": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "num_stages": 4},
        "skinny": {"BLOCK_SIZE_M": 4, "BLOCK_SIZE_N": 8, "BLOCK_SIZE_K": 256, "num_warps": 4, "num_stages": 2},
        "sliced": {"BLOCK_SIZE_M": 8, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 512, "num_warps": 4, "num_stages": 3},
        "streamed": {"BLOCK_SIZE_M": 8, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 512, "num_warps": 8, "num_stages": 2},
    }
    function = getattr(gemmpipe.runtime, family.entry_point)
    with torch.inference_mode():
        try:
            out = function(*operands, config={"kernel_type": kind, **knobs[kind]})
        except DoesNotFit as error:
            pytest.skip(str(error))  # a kernel of another architecture
    assert error_ratio(out, family.reference(spec, inputs, weights), *family.tolerance(spec)) < 0.01


def test_compiled() -> None:
    family, spec, weights, inputs, (x, w, x_scale, w_scale) = made("a8w8_blockscale")
    config = config_of("a8w8_blockscale")
    function = getattr(gemmpipe.runtime, family.entry_point)

    def layer(x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        return function(x, w, x_scale, w_scale, config=config)

    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(x, x_scale).clone()
    assert error_ratio(out, family.reference(spec, inputs, weights), *family.tolerance(spec)) < 0.01


@pytest.mark.parametrize("tag", ["A16W16", "A8W8_BLOCKSCALE", "A16W16-ATOMIC"])
def test_the_documents_call_tunes_our_kernel(tag: str, tmp_path: Path) -> None:
    found = tune_and_save_configs(
        batch_sizes=[16, 512],
        N=1024,
        K=1024,
        dtype=torch.bfloat16,
        search_space=[{**config, "BLOCK_SIZE_K": 128} for config in get_search_space(small=True)],
        save_path=tmp_path,
        device_name=gemmpipe.get_arch(),
        tag=f"{tag}-N=1024-K=1024",
    )
    assert set(found) == {"small_M", "medium_M"}
    path = tmp_path / f"{gemmpipe.get_arch()}-GEMM-{tag}-N=1024-K=1024.json"
    assert json.loads(path.read_text()) == found
