"""Copies of operands with a layout that a kernel cannot read are reported once."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from gemmpipe.backends import Backend
from gemmpipe.backends.aiter import Asm, Ck
from gemmpipe.backends.aten import Torch
from gemmpipe.backends.cublaslt import CublasLt
from gemmpipe.backends.deepgemm import DeepGemm
from gemmpipe.backends.engine_pair import SglangPair, VllmPair
from gemmpipe.backends.flashinfer import FlashInfer
from gemmpipe.backends.quantised_library import QuantisedLibrary
from gemmpipe.backends.vllm_cutlass import VllmCutlass
from gemmpipe.core.data import Candidate, Device, Knobs
from gemmpipe.core.device import cpu_device
from gemmpipe.family import GemmSpec, Inputs, KernelDefaults, Launch, Prepared, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.runtime import fused_moe, gemm_a16w16
from gemmpipe.runtime.binding import generic_call
from gemmpipe.runtime.copy_log import log_copied, log_copied_output, log_padded
from gemmpipe.runtime.operands import CallOperands, aligned, inputs_of, weights_of
from gemmpipe.runtime.select import RunnableCandidate
from gemmpipe.runtime.selection_log import LOG

WORDS = KernelDefaults(dtype=None, out_dtype=None, bias=None)
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


@pytest.mark.parametrize("argument", ["x", "w", "x_scale", "w_scale"])
def test_a_library_that_reads_no_strides_reads_reported_copies(messages: Said, argument: str) -> None:
    """DeepGEMM's launch has addresses alone: it would read other values."""
    read: dict[str, torch.Tensor] = {}

    class Library(Backend):
        label = "library"
        reads_strides = False

        def unsupported_reason(self, spec: GemmSpec, knobs: Knobs, device: Device) -> str | None:
            return None

        def bind(
            self, spec: GemmSpec, knobs: Knobs, device: Device, inputs: Inputs, prepared: Prepared, out: torch.Tensor
        ) -> Launch:
            weights = prepared.weights
            assert inputs.x_scale is not None
            assert weights.w_scale is not None
            read.update(x=inputs.x, w=weights.w, x_scale=inputs.x_scale, w_scale=weights.w_scale)
            return lambda: out

    family = load_family("a8w8_blockscale")
    spec = family.spec(make_problem(family, {"M": 8, "N": 256, "K": 384}, WORDS, "sm_90", "test"))
    generator = torch.Generator().manual_seed(1)
    inputs, weights = family.make_inputs(spec, generator), family.make_weights(spec, generator)
    assert inputs.x_scale is not None
    assert weights.w_scale is not None
    given = {"x": inputs.x, "w": weights.w, "x_scale": inputs.x_scale, "w_scale": weights.w_scale}
    runnable = RunnableCandidate(implementation=Library(), candidate=Candidate.of("library", {}))
    call = generic_call(runnable, spec, cpu_device(), torch.bfloat16)
    call(*given.values(), None)
    column = inputs.x_scale.t().contiguous().t()
    call(inputs.x, weights.w, column, weights.w_scale, None)
    assert messages() == []
    assert read["x_scale"].data_ptr() == column.data_ptr(), (
        "the library's launch orders scales that lie M-major, as in the tabulated time"
    )
    wide = torch.cat([given[argument].view(torch.uint8)] * 2, dim=1).view(given[argument].dtype)
    strided = {**given, argument: wide[:, : given[argument].shape[1]]}
    call(*strided.values(), None)
    (text,) = messages()
    assert text.startswith(f"gemmpipe: {argument} ")
    for name, tensor in read.items():
        assert tensor.is_contiguous()
        assert torch.equal(tensor.view(torch.uint8), given[name].view(torch.uint8))


def test_libraries_that_read_addresses_alone_declare_it() -> None:
    assert Torch.reads_strides
    for library in (CublasLt, DeepGemm, FlashInfer, VllmCutlass, QuantisedLibrary, VllmPair, SglangPair, Ck, Asm):
        assert not library.reads_strides, library


@pytest.mark.parametrize("shape", [(2, 3, 1), (2, 3, 3)])
def test_scales_that_are_no_view_of_rows_are_reported(messages: Said, shape: tuple[int, ...]) -> None:
    family = load_family("a8w8_blockscale")
    rows, blocks = shape[0] * shape[1], shape[2]
    key = {"M": rows, "N": 128, "K": 128 * blocks}
    spec = family.spec(make_problem(family, key, WORDS, "sm_90", "test"))
    x, w = torch.zeros(*shape[:2], key["K"]).to(torch.float8_e4m3fn), torch.zeros(128, key["K"]).to(torch.float8_e4m3fn)
    scales = torch.rand(shape[1], shape[0], blocks).transpose(0, 1)
    given = CallOperands(x=x, w=w, x_scale=scales, w_scale=torch.ones(1, blocks), bias=None, out_dtype=torch.bfloat16)
    found = inputs_of(given, spec).x_scale
    assert found is not None
    assert torch.equal(found, scales.reshape(rows, blocks))
    (text,) = messages()
    assert text.startswith(f"gemmpipe: x_scale float32 {list(shape)} has strides")


def test_padding_and_conversions_are_reported(messages: Said) -> None:
    log_padded(torch.zeros(13, 8), 16)
    x, w, bias = torch.zeros(4, 8).bfloat16(), torch.zeros(16, 8).bfloat16(), torch.zeros(16)
    given = CallOperands(x=x, w=w, x_scale=None, w_scale=None, bias=bias, out_dtype=torch.bfloat16)
    family, defaults = load_family("a16w16"), KernelDefaults(dtype=None, out_dtype=None, bias=True)
    spec = family.spec(make_problem(family, {"M": 4, "N": 16, "K": 8}, defaults, "cpu_avx2", "test"))
    assert weights_of(given, spec).bias.dtype is torch.bfloat16
    padded, converted = messages()
    assert "x float32 [13, 8] is padded to rows 16" in padded
    assert "bias float32 [16] is read as bfloat16" in converted


def test_an_output_that_the_candidate_does_not_write_is_reported(messages: Said) -> None:
    x, w = torch.randn(4, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    expected = gemm_a16w16(x, w)
    direct = torch.empty(4, 8, dtype=torch.bfloat16)
    assert gemm_a16w16(x, w, y=direct) is direct
    assert gemm_a16w16(x[:0], w, y=direct[:0]).shape == (0, 8)
    assert messages() == []
    strided = torch.empty(8, 4, dtype=torch.bfloat16).t()
    assert torch.equal(gemm_a16w16(x, w, y=strided), expected)
    (text,) = messages()
    assert text.startswith("gemmpipe: y bfloat16 [4, 8] has strides [1, 4]: copied in every such call")
    log_copied_output(direct, direct=False, shared=True)
    assert messages()[-1].startswith("gemmpipe: y bfloat16 [4, 8] shares memory with x: copied in every such call")
    log_copied_output(direct, direct=True)
    assert messages()[-1].startswith("gemmpipe: y bfloat16 [4, 8] is not written by the candidate")


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
