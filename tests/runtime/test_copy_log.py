"""Copies of operands with a layout that a kernel cannot read are reported once."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from gemmpipe.backends.aten import Torch
from gemmpipe.backends.cublaslt import CublasLt
from gemmpipe.runtime import fused_moe, gemm_a16w16
from gemmpipe.runtime.copy_log import log_copied, log_copies, log_padded
from gemmpipe.runtime.operands import CallOperands, aligned, weights_of
from gemmpipe.runtime.selection_log import LOG

Said = Callable[[], list[str]]


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    LOG.clear()
    yield
    LOG.clear()


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Said:
    caplog.set_level(logging.WARNING, "gemmpipe.runtime")
    return lambda: [r.getMessage() for r in caplog.records if "copied in every such call" in r.getMessage()]


def test_strides_and_addresses_are_reported_once_each(messages: Said) -> None:
    weight = torch.zeros(32, 16).t()
    for _ in range(3):
        assert aligned(weight, "w").is_contiguous()
    (strided,) = messages()
    assert strided.startswith("gemmpipe: w float32 [16, 32] has strides [1, 16]: copied in every such call (2,048 b")
    aligned(torch.zeros(65)[1:].view(8, 8), "w")
    assert "is not aligned to 16 bytes" in messages()[-1]
    aligned(torch.zeros(8, 8), "x"), aligned(weight)
    assert len(messages()) == 2, "no report for an operand without a copy, or for a tensor without a name"


def test_every_shape_is_in_the_selection_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMPIPE_LOG_SELECTION", "1")
    caplog.set_level(logging.INFO, "gemmpipe.runtime")
    for rows in (8, 16, 16):
        log_copied("w", torch.zeros(rows, 32).t())
    steps = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert [text.partition("[32, ")[2].partition("]")[0] for text in steps] == ["8", "16"]
    assert sum(r.levelno == logging.WARNING for r in caplog.records) == 1


def test_a_library_that_reads_no_strides_reports_its_copies(messages: Said) -> None:
    assert (Torch().reads_strides, CublasLt().reads_strides) == (True, False)
    log_copies(x=torch.zeros(8, 8), w=torch.zeros(16, 8).t(), bias=None)
    (text,) = messages()
    assert text.startswith("gemmpipe: w float32 [8, 16] has strides [1, 8]")


def test_padding_and_conversions_are_reported(messages: Said) -> None:
    log_padded(torch.zeros(13, 8), 16)
    x, w, bias = torch.zeros(4, 8).bfloat16(), torch.zeros(16, 8).bfloat16(), torch.zeros(16)
    given = CallOperands(x=x, w=w, x_scale=None, w_scale=None, bias=bias, out_dtype=torch.bfloat16)
    from gemmpipe.family import KernelDefaults, load_family
    from gemmpipe.family.problem import make_problem

    family, words = load_family("a16w16"), KernelDefaults(dtype=None, out_dtype=None, bias=True)
    spec = family.spec(make_problem(family, {"M": 4, "N": 16, "K": 8}, words, "cpu_avx2", "test"))
    assert weights_of(given, spec).bias.dtype is torch.bfloat16
    padded, converted = messages()
    assert "x float32 [13, 8] is padded to rows 16" in padded
    assert "bias float32 [16] is read as bfloat16" in converted


def test_activations_that_are_no_view_of_rows_are_reported(messages: Said) -> None:
    wide = torch.randn(2, 4, 3, 32).bfloat16()
    x, w = wide.transpose(1, 2)[..., :16], torch.randn(8, 16).bfloat16()
    expected = torch.nn.functional.linear(x.contiguous(), w)
    torch.testing.assert_close(gemm_a16w16(x, w, out_dtype=torch.float32).bfloat16(), expected, atol=0.05, rtol=0.05)
    (text,) = messages()
    assert text.startswith("gemmpipe: x bfloat16 [2, 3, 4, 16] has strides")


@pytest.mark.parametrize("as_engine", [True, False])
def test_experts_report_converted_routing_and_weights(messages: Said, as_engine: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 32, generator=generator).bfloat16()
    w1 = torch.randn(2, 64, 32, generator=generator).bfloat16()
    w2 = torch.randn(2, 32, 32, generator=generator).bfloat16()
    shares, ids = torch.full((4, 1), 0.5), torch.tensor([[0], [1], [0], [1]], dtype=torch.int32)
    plain = fused_moe(x, w1, w2, shares, ids)
    assert messages() == []
    if as_engine:
        other = fused_moe(x, w1, w2, shares.bfloat16(), ids.long())
        kinds = ["topk_ids int64 [4, 1] is read as int32", "topk_weights bfloat16 [4, 1] is read as float32"]
    else:
        other = fused_moe(x, w1.mT.contiguous().mT, w2, shares, ids)
        kinds = ["w1 bfloat16 [2, 64, 32] has strides [2048, 1, 64]"]
    assert torch.equal(plain, other)
    assert [text.removeprefix("gemmpipe: ").partition(":")[0] for text in messages()] == kinds
