"""Fallbacks on a GPU without a table: the skinny kernel for one row of 16 bits, libraries for more."""

from collections.abc import Callable

import pytest
import torch

from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio
from gemmpipe.runtime import gemm_a16w16

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@pytest.fixture
def steps(monkeypatch, caplog) -> Callable[[], str]:
    """The last step of the look-up."""
    monkeypatch.setenv("GEMMPIPE_LOG_SELECTION", "1")
    caplog.set_level("INFO", logger="gemmpipe.runtime")
    return lambda: [record.message for record in caplog.records][-1]


def operands(m: int, n: int, k: int, dtype: torch.dtype, *, bias: bool) -> Operands:
    generator = torch.Generator("cuda").manual_seed(n)
    x = torch.randn(m, k, generator=generator, device="cuda").to(dtype)
    w = (torch.randn(n, k, generator=generator, device="cuda") * k**-0.5).to(dtype)
    return x, w, torch.randn(n, generator=generator, device="cuda").to(dtype) if bias else None


def right(out: torch.Tensor, given: Operands) -> None:
    x, w, bias = given
    family, defaults = load_family("a16w16"), KernelDefaults(dtype=None, out_dtype=None, bias=None)
    sizes = {"M": x.numel() // x.shape[-1], "N": w.shape[0], "K": w.shape[1]}
    spec = family.spec(make_problem(family, sizes, defaults, "sm_90", "case"))
    expected = x.double().reshape(-1, x.shape[-1]) @ w.double().T
    expected = (expected if bias is None else expected + bias.double()).float()
    assert out.shape == (*x.shape[:-1], w.shape[0])
    assert error_ratio(out.reshape(expected.shape), expected, *family.tolerance(spec)) < 0.01


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1280, 8192), (1000, 96), (257, 200), (64, 4096)])
def test_one_row(steps, n: int, k: int, dtype: torch.dtype, bias: bool) -> None:
    given = operands(1, n, k, dtype, bias=bias)
    for _ in range(3):
        right(gemm_a16w16(*given), given)
    assert "fallback: defaults: skinny" in steps()


def test_one_row_with_any_layout() -> None:
    x, w, _ = operands(1, 1280, 2048, torch.bfloat16, bias=False)
    expected = gemm_a16w16(x, w)
    wide = torch.empty(1, 4096, device="cuda", dtype=x.dtype)[:, ::2].copy_(x)
    moved = torch.empty(2049, device="cuda", dtype=x.dtype)[1:].copy_(x[0])
    for each in (wide, moved, x[0], x[None]):
        out = gemm_a16w16(each, w)
        assert out.shape == (*each.shape[:-1], 1280)
        assert torch.equal(out.view(1, -1), expected)
    assert torch.equal(gemm_a16w16(x, w.T.contiguous().T), expected)
    right(gemm_a16w16(x, w, out_dtype=torch.float32), (x, w, None))


def test_more_rows_are_a_librarys(steps) -> None:
    for m in (2, 16, 300):
        given = operands(m, 1280, 2048, torch.bfloat16, bias=False)
        right(gemm_a16w16(*given), given)
        assert "fallback: defaults: torch" in steps()


def test_one_row_in_a_graph_and_compiled() -> None:
    given = operands(1, 1280, 8192, torch.bfloat16, bias=True)
    expected = gemm_a16w16(*given).clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = gemm_a16w16(*given)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)
    torch.compiler.reset()
    compiled = torch.compile(gemm_a16w16, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            right(compiled(*given), given)
