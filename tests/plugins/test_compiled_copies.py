"""A compiled layer has our product in place of the engine's, and no copy of its operands or output around it."""

import re
from collections.abc import Iterator

import pytest
import torch

from gemmpipe.plugins.engine_dispatch import EngineKernel, register_kernel
from gemmpipe.plugins.operators import register_plugin_operators

pytestmark = pytest.mark.compile
N, K = 256, 384
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


def write_ones(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    scale.fill_(1.0)


@pytest.fixture
def quantiser() -> Iterator[None]:
    """An engine's quantiser: an operator that writes x in fp8 and its scales into given tensors."""
    library = torch.library.Library("gemmpipe_test", "FRAGMENT")
    library.define("quantise(Tensor x, Tensor(a!) q, Tensor(b!) scale) -> ()")
    library.impl("quantise", write_ones, "CompositeExplicitAutograd")
    torch.library.register_fake("gemmpipe_test::quantise", lambda x, q, scale: None, lib=library)
    yield
    library._destroy()


def padded_scales(m: int, blocks: int) -> torch.Tensor:
    """M-major in lines of a multiple of four rows, as DeepGEMM reads them."""
    return torch.empty_strided((m, blocks), (1, (m + 3) // 4 * 4), dtype=torch.float32)


@pytest.mark.slow
def test_neither_operands_nor_the_output_are_copied(quantiser: None) -> None:
    seen: list[tuple[int, ...]] = []

    def product(x, w, x_scale, w_scale, bias):
        seen.append(x_scale.stride())
        return torch.ones(x.shape[0], w.shape[0], dtype=BF16)

    from torch._inductor.utils import run_and_get_code  # seconds, for this test alone

    register_plugin_operators()
    kernel = register_kernel(EngineKernel(name="test", call=product))

    def linear(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        q, scale = torch.empty(x.shape, dtype=FP8), padded_scales(x.shape[0], x.shape[1] // 128)
        torch.ops.gemmpipe_test.quantise(x, q, scale)
        out = torch.ops.gemmpipe.engine_product("a8w8_blockscale", q, w, scale, w_scale, None, BF16, kernel)
        return out.to(dtype=BF16).view(x.shape[0], w.shape[0])

    @torch.compile(fullgraph=True)
    def two_layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return linear(linear(x, *weights[:2]), *weights[2:])

    weights = [torch.zeros(N, K).to(FP8), torch.ones(2, 3), torch.zeros(K, N).to(FP8), torch.ones(3, 2)]
    bodies = []
    for m in (10, 7):
        x = torch.zeros(m, K, dtype=BF16)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            out, code = run_and_get_code(two_layers, x, *weights)
        assert torch.equal(out, torch.ones(m, K, dtype=BF16))
        bodies += [each[each.index("def call(") : each.index("return (")] for each in code]
    assert [body.count("engine_product.default(") for body in bodies] == [2, 2]
    for body in bodies:
        assert not re.findall(r"\w*_fused_\w*\(|copy_\(|clone|contiguous", body)
    assert seen == [(1, 12), (1, 12), (1, 8), (1, 8)]
