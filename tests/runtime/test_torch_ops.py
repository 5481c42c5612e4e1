"""Under torch.compile: one operator, no graph break, the same numbers."""

import subprocess
import sys

import pytest
import torch
from pairwise import pairwise
from torch._subclasses.fake_tensor import FakeTensorMode

from gemmpipe.runtime import gemm_a8w8_blockscale, gemm_a16w16
from gemmpipe.runtime.selection_log import LOG


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


@pytest.mark.compile
@pytest.mark.parametrize(("backend", "dynamic"), pairwise(["eager", "aot_eager"], [False, True], once=True))
def test_fullgraph(row, table, x, w, backend: str, dynamic: bool) -> None:
    table(row(4, "onednn", {"method": "float32_packed"}))

    def both(x: torch.Tensor) -> torch.Tensor:
        return gemm_a16w16(x * 2, w).relu() + 1

    compiled = torch.compile(both, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in ((4,), (5,), (2, 3)):
        with torch.no_grad():
            assert torch.equal(compiled(x(*rows)), both(x(*rows)))
    with torch.inference_mode():
        assert torch.equal(compiled(x(4)), both(x(4)))


@pytest.mark.compile
def test_gradients_and_autocast_stay_in_the_graph(row, table, x, w) -> None:
    table(row(4, "torch", {"method": "float32_copy"}))
    weight = torch.nn.Parameter(w)
    compiled = torch.compile(gemm_a16w16, fullgraph=True, backend="aot_eager")
    compiled(x(4), weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(x(4).float(), w.float()).dtype == torch.bfloat16


@pytest.mark.compile
def test_the_operator_keeps_torchs_rules(x, w) -> None:
    x8, w8 = x(4).to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    torch.compile(gemm_a8w8_blockscale, fullgraph=True, backend="eager")(x8, w8, torch.ones(4, 1), torch.ones(1, 1))
    operands = ("a16w16", x(4), w, None, None, None, torch.bfloat16)
    torch.library.opcheck(torch.ops.gemmpipe.product.default, operands)


def test_shape_propagation_leaves_nothing_behind(row, table, x, w) -> None:
    table(row(4, "onednn", {"method": "float32_packed"}))
    for _ in range(2):  # before and after a call with memory
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            assert gemm_a16w16(mode.from_tensor(x(4)), mode.from_tensor(w)).shape == (4, 64)
        gemm_a16w16(x(4), w)
        assert set(LOG.steps.values()) == {"exact"}


@pytest.mark.slow  # it imports torch and torch._dynamo
def test_in_a_process_that_never_called_it_before() -> None:
    script = """
import torch
from gemmpipe.runtime import gemm_a16w16
assert not hasattr(torch.ops.gemmpipe, "product")
x, w = torch.ones(3, 32).bfloat16(), torch.ones(16, 32).bfloat16()
print(torch.compile(gemm_a16w16, fullgraph=True, backend="eager")(x, w).sum().item())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(3 * 16 * 32.0), done.stderr
