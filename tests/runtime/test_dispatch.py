"""Calls on the CPU: the selected candidates, skipped rows, and every kind of operand."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked_programs import Forking
from torch.nn.functional import linear

from gemmpipe.backends.aten import Torch
from gemmpipe.backends.onednn import OneDnn
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.core.errors import UserError
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.runtime import gemm_a8w8_blockscale, gemm_a16w16, linear_fp8, reload
from gemmpipe.runtime.binding import generic_call, padded_call
from gemmpipe.runtime.dispatch import dispatch_of
from gemmpipe.runtime.operands import CallOperands, problem_of
from gemmpipe.runtime.select import fallback_candidates
from gemmpipe.runtime.selection_log import LOG

MM, COPY, PACKED = {"method": "mm"}, {"method": "float32_copy"}, {"method": "float32_packed"}


def close(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    torch.testing.assert_close(out.float(), linear(x.float(), w.float(), bias), atol=0.02, rtol=0.02)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("GEMMPIPE_LOG_SELECTION", "1")
    caplog.set_level("INFO", "gemmpipe.runtime")

    def take_steps() -> list[str]:
        texts = [record.getMessage().partition("bpreshuffle=False: ") for record in caplog.records]
        caplog.clear()
        return [step for _, key, step in texts if key]  # others report copies

    return take_steps


def test_exact_then_padded_then_the_rules(row, table, x, w, steps) -> None:
    path = table(row(4, "onednn", PACKED), row(16, "torch", COPY), row(512, "torch", COPY))
    close(gemm_a16w16(x(4), w), x(4), w)
    assert steps() == [f"exact: M=4 of {path}: onednn method=float32_packed"]
    close(gemm_a16w16(x(5), w), x(5), w)
    assert steps() == ["exact M=5: no row", f"padded: M=16 of {path}: torch method=float32_copy"]
    close(gemm_a16w16(x(300), w), x(300), w)
    assert steps()[2] == f"padded: M=512 of {path}: torch method=float32_copy"
    close(gemm_a16w16(x(17), w), x(17), w)
    assert steps() == ["exact M=17: no row", "padded M=32: no row", "fallback: defaults: torch method=mm"]
    close(gemm_a16w16(x(17), w), x(17), w)
    close(gemm_a16w16(x(1, 17), w), x(1, 17), w)
    assert steps() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"libtype": "cublaslt"}, "backend: cublaslt: no NVIDIA GPU"),
        ({"libtype": "cublazlt"}, "backend: no 'cublazlt' in this installation"),
        ({"libtype": "scaled_mm", "config": '{"use_fast_accum": false}'}, "backend: scaled_mm: no GPU"),
        ({"libtype": "triton", "config": '{"BLOCK_SIZE_M": 16}'}, "knobs: triton: KeyError"),
        ({"libtype": "triton", "config": '{"BLOCK_SIZE_Q": 16}'}, "knobs: triton has no BLOCK_SIZE_Q"),
        ({"config": '{"method": "magic"}'}, "unsupported: method: no 'magic'"),
        ({"config": '{"method": "mm", "fast": true}'}, "knobs: torch has no fast"),
        ({"config": "{}"}, "knobs: torch: KeyError"),
        ({"libtype": "flydsl", "config": None}, "backend: no 'flydsl'"),
        (
            {"kernelName": "torch@0123abcd"},
            "kernel: its source or library is unknown here, the row was tuned with 0123abcd",
        ),
    ],
)
def test_a_stored_candidate_that_does_not_run_here_costs_one_warning(
    row, table, x, w, caplog, change: dict[str, str], reason: str
) -> None:
    table({**row(4, "torch", COPY), **change}, {**row(16, "torch", COPY), **change})
    for rows in (4, 4, 16):
        close(gemm_a16w16(x(rows), w), x(rows), w)
    (message,) = [record.getMessage() for record in caplog.records]
    assert reason in message
    assert "\n" not in message


def test_a_changed_kernel_is_not_run(row, table, x, w, caplog) -> None:
    tiles = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "num_warps": 4, "num_stages": 2}
    table(row(4, "triton", tiles, kernelName="product@00000000"))
    close(gemm_a16w16(x(4), w), x(4), w)
    assert "the row was tuned with 00000000" in caplog.text


def test_a_candidate_that_fails_when_run_is_skipped(row, table, x, w, caplog, monkeypatch) -> None:
    table(row(4, "onednn", PACKED), row(16, "torch", COPY))

    def fail(*operands: object) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr("gemmpipe.backends.onednn.OneDnn.prepare", fail)
    close(gemm_a16w16(x(4), w), x(4), w)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith("onednn method=float32_packed failed and is skipped: RuntimeError: no such instruction")
    (call,) = dispatch_of("a16w16").calls.values()
    close(call(x(4), w, None, None, None), x(4), w)


def test_a_candidate_that_takes_multiples_only_gets_padded_rows(row, table, x, w, steps, monkeypatch) -> None:
    unsupported = OneDnn.unsupported_reason

    def fours(self, spec, knobs, device):
        return f"alignment: M={spec.m}" if spec.m % 4 else unsupported(self, spec, knobs, device)

    monkeypatch.setattr("gemmpipe.backends.onednn.OneDnn.unsupported_reason", fours)
    path = table(row(16, "onednn", PACKED))
    for rows in ((13,), (13, 1)):
        close(gemm_a16w16(x(*rows), w), x(*rows), w)
    close(gemm_a16w16(x(12), w), x(12), w)
    assert steps() == [
        "exact M=13: no row",
        f"padded: M=16 of {path}: onednn method=float32_packed on 16 rows",
        "exact M=12: no row",
        f"padded: M=16 of {path}: onednn method=float32_packed",
    ]


def test_a_kernel_of_the_family_may_be_the_default_for_few_rows(row, table, x, w, steps, monkeypatch) -> None:
    class Few(Torch):
        """Replaces a skinny kernel."""

        label = "skinny"

        def default_config(self, spec, device):
            return {"method": "mm"} if spec.m <= 16 else None

    family = load_family("a16w16")
    few = replace(family, implementations=(Few(), *family.implementations))
    monkeypatch.setattr("gemmpipe.kernels.a16w16.FAMILY", few)
    table()
    close(gemm_a16w16(x(16), w), x(16), w)
    assert steps()[-1] == "fallback: defaults: skinny method=mm"
    close(gemm_a16w16(x(17), w), x(17), w)
    assert steps()[-1] == "fallback: defaults: torch method=mm"


@pytest.mark.parametrize(
    ("name", "m", "labels"),
    [("a16w16", 1, ["streamed", "skinny"]), ("a16w16", 2, ["streamed"]), ("a16w16", 3, []), ("a8w8", 1, ["streamed"])],
)
def test_few_rows_without_a_row_are_our_kernels(name: str, m: int, labels: list[str]) -> None:
    family, device = load_family(name), arch_device("sm_90")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": m, "N": 1280, "K": 8192}, defaults, device.gfx, "case"))
    own = [
        found for found in fallback_candidates(family, spec, device) if found.implementation in family.implementations
    ]
    assert [found.implementation.label for found in own] == labels


def test_padded_rows_take_their_scales_along() -> None:
    x, w, x_scale, w_scale = _scaled(6)
    family = dispatch_of("a8w8_blockscale").family
    given = CallOperands(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=None, out_dtype=torch.bfloat16)
    spec = family.spec(problem_of(family, given))
    chosen = next(fallback_candidates(family, spec, cpu_device()))
    inner = generic_call(chosen, replace(spec, m=8), cpu_device(), torch.bfloat16)
    out = padded_call(inner, spec, 8)(x.view(2, 3, 200), w, x_scale, w_scale, None)
    assert torch.equal(out.view(6, 144), gemm_a8w8_blockscale(x, w, x_scale, w_scale))


def test_other_tools_rows_of_a_library_need_no_config(row, table, x, w, steps) -> None:
    path = table(row(4, "torch", None))
    close(gemm_a16w16(x(4), w), x(4), w)
    assert steps() == [f"exact: M=4 of {path}: torch method=mm"]


@pytest.mark.parametrize("knobs", [MM, COPY, PACKED])
def test_operands_of_every_layout(row, table, x, w, knobs) -> None:
    backend = "onednn" if knobs is PACKED else "torch"
    table(*(row(m, backend, knobs, bias=bias) for m in (6, 16) for bias in (False, True)))
    bias = torch.randn(64).bfloat16()
    close(gemm_a16w16(x(2, 3), w), x(2, 3), w)
    assert gemm_a16w16(x(2, 3), w).shape == (2, 3, 64)
    assert gemm_a16w16(x(), w).shape == (64,)
    close(gemm_a16w16(x(6), w, bias), x(6), w, bias.float())
    strided = x(6, 2)[:, 1]
    close(gemm_a16w16(strided, w), strided, w)
    transposed = w.t().contiguous().t()
    close(gemm_a16w16(x(6), transposed), x(6), w)
    with torch.inference_mode():
        close(gemm_a16w16(x(6), w.clone()), x(6), w)
    for shape in ((0,), (2, 0), (0, 2)):
        assert gemm_a16w16(x(*shape), w).shape == (*shape, 64)


def test_no_inner_element_is_a_sum_of_nothing() -> None:
    empty = torch.empty(2, 0, dtype=torch.bfloat16)
    assert gemm_a16w16(empty, torch.empty(3, 0, dtype=torch.bfloat16)).eq(0).all()
    assert gemm_a16w16(empty, torch.empty(3, 0, dtype=torch.bfloat16), torch.ones(3).bfloat16()).eq(1).all()
    meta = torch.empty(2, 96, dtype=torch.bfloat16, device="meta")
    assert gemm_a16w16(meta, torch.empty(3, 96, dtype=torch.bfloat16, device="meta")).shape == (2, 3)


def test_another_output_type(row, table, x, w) -> None:
    table(row(4, "torch", COPY, outdtype="float32"))
    out = gemm_a16w16(x(4), w, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, linear(x(4).float(), w.float()), atol=1e-5, rtol=1e-5)


def test_gradients_are_torchs_own(row, table, x, w) -> None:
    table(row(4, "torch", COPY))
    weight = torch.nn.Parameter(w)
    gemm_a16w16(x(4), weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not gemm_a16w16(x(4), weight).requires_grad


def test_recorded_gradients_are_reported_once(row, table, x, w, caplog) -> None:
    table(row(4, "torch", COPY))
    for _ in range(2):
        gemm_a16w16(x(4).requires_grad_(), w)
    (line,) = [record.message for record in caplog.records]
    assert "torch.no_grad()" in line
    assert not LOG.steps


@pytest.mark.compile
@pytest.mark.parametrize(
    ("place", "compiled"),
    [
        pytest.param(place, compiled, marks=pytest.mark.slow if compiled and place else ())
        for compiled in (False, True)
        for place in range(4)
    ],
)
def test_gradients_of_quantised_operands_are_refused_rather_than_lost(place: int, compiled: bool) -> None:
    operands = list(_scaled(4))
    operands[place].requires_grad_()
    call = torch.compile(gemm_a8w8_blockscale, backend="eager") if compiled else gemm_a8w8_blockscale
    with pytest.raises(UserError, match=r"record no gradients.*no_grad"):
        call(*operands)
    with torch.no_grad():
        assert call(*operands).shape == (4, 144)


def test_autocast_as_torchs_linear(row, table, x, w) -> None:
    table(row(4, "torch", COPY))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = gemm_a16w16(x(4).float(), w.float())
    assert out.dtype == torch.bfloat16
    close(out, x(4), w)
    with torch.autocast("cpu", dtype=torch.float16):
        assert gemm_a8w8_blockscale(*_scaled(4)).dtype == torch.bfloat16


def _scaled(m: int) -> tuple[torch.Tensor, ...]:
    x, w = torch.randn(m, 200).to(torch.float8_e4m3fn), torch.randn(144, 200).to(torch.float8_e4m3fn)
    return x, w, torch.rand(m, 2) + 0.5, torch.rand(2, 2) + 0.5


def _turned(place: int) -> tuple[torch.Tensor, ...]:
    """Operands with transposed scales of one of them: the same number of values in another order."""
    x, w = torch.zeros(4, 384).to(torch.float8_e4m3fn), torch.zeros(256, 384).to(torch.float8_e4m3fn)
    if place == 0:
        return x[:, :256], w[:, :256], torch.ones(2, 4), torch.ones(2, 2)
    return x, w, torch.ones(4, 3), torch.ones(3, 2)


def test_scales_in_both_layouts() -> None:
    x, w, x_scale, w_scale = _scaled(6)
    full_x = x.float() * x_scale.repeat_interleave(128, 1)[:, :200]
    full_w = w.float() * w_scale.repeat_interleave(128, 0)[:144].repeat_interleave(128, 1)[:, :200]
    for scale in (x_scale, x_scale.t().contiguous().t()):
        out = gemm_a8w8_blockscale(x, w, scale, w_scale)
        torch.testing.assert_close(out.float(), full_x @ full_w.t(), atol=0.5, rtol=0.05)
    shaped = gemm_a8w8_blockscale(x.view(2, 3, 200), w, x_scale.view(2, 3, 2), w_scale)
    assert torch.equal(shaped.view(6, 144), gemm_a8w8_blockscale(x, w, x_scale, w_scale))


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (lambda x, w: gemm_a16w16(x.float(), w), "x is float32, expected bfloat16"),
        (lambda x, w: gemm_a16w16(x, w[:, :5]), "x [4, 96] and w [64, 5], expected [..., K] and [N, K]"),
        (lambda x, w: gemm_a16w16(x, w, torch.ones(3)), "bias [3], expected [64]"),
        (lambda x, w: gemm_a16w16(x, w, x_scale=torch.ones(1)), "bfloat16"),
        (
            lambda x, w: gemm_a8w8_blockscale(*_scaled(4)[:2], torch.ones(4), torch.ones(2, 2)),
            "expected float32 [4, 2]",
        ),
        (lambda x, w: gemm_a8w8_blockscale(*_scaled(4)[:3], torch.ones(2, 2).half()), "w_scale: float16 [2, 2]"),
        (lambda x, w: gemm_a8w8_blockscale(*_turned(0)), "x_scale: float32 [2, 4], expected float32 [4, 2]"),
        (lambda x, w: gemm_a8w8_blockscale(*_turned(1)), "w_scale: float32 [3, 2], expected float32 [2, 3]"),
    ],
)
def test_operands_that_are_no_product(x, w, call, arguments: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        call(x(4), w)
    assert arguments in str(error.value)


def test_threads_share_what_one_of_them_found(row, table, x, w) -> None:
    table(row(4, "onednn", PACKED))

    def work(rows: int) -> None:
        close(gemm_a16w16(x(rows), w), x(rows), w)

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(work, (1, 4, 5, 33) * 50))) == 200


def test_untuned_keys_are_counted(row, table, x, w) -> None:
    table(row(16, "torch", COPY))
    for rows in (5, 17, 17, 18):
        gemm_a16w16(x(rows), w)
    assert "a16w16: 2 untuned (3 calls, most: M=17 N=64 K=96 " in LOG.summary()
    assert LOG.summary().endswith("), 1 with a row of a padded M")


@pytest.mark.e2e
def test_and_summed_up_in_one_line_at_exit(tmp_path: Path, forked_programs: Forking) -> None:
    script = """
import torch
from gemmpipe.runtime import gemm_a16w16
x, w = torch.ones(3, 32).bfloat16(), torch.ones(16, 32).bfloat16()
gemm_a16w16(x, w), gemm_a16w16(x, w)
"""
    (tmp_path / "script.py").write_text(script)
    done = forked_programs.run(tmp_path, os.environ, "script.py", ())
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "a16w16: 1 untuned (2 calls, most: M=3 N=16 K=32" in line


def test_tables_are_read_again_on_request(row, table, x, w, steps) -> None:
    table(row(4, "torch", COPY))
    gemm_a16w16(x(4), w)
    path = table(row(4, "torch", MM))
    steps()
    reload()
    gemm_a16w16(x(4), w)
    assert steps() == [f"exact: M=4 of {path}: torch method=mm"]


def test_rows_of_another_product_are_used_with_a_warning(row, table, x, w, caplog) -> None:
    path = table(row(4, "onednn", PACKED, device="NVIDIA H100"), row(8, "torch", COPY, device=cpu_device().name))
    for m in (8, 4, 4):
        close(gemm_a16w16(x(m), w), x(m), w)
    (warning,) = [record.getMessage() for record in caplog.records if "timed on" in record.getMessage()]
    assert warning.startswith(f"gemmpipe: {path}: rows timed on NVIDIA H100 are used on {cpu_device().name}")


@pytest.mark.parametrize("scale", [torch.rand(2, 3) + 0.5, torch.rand(160) + 0.5], ids=["blocks", "rows"])
def test_a_bias_of_a_linear_layer_in_fp8(scale: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    """Kernels of products by blocks have no bias: it is added after them, which is reported once."""
    LOG.clear()
    x, w, bias = torch.randn(4, 300).bfloat16(), torch.randn(160, 300).to(torch.float8_e4m3fn), 9 * torch.randn(160)
    rows = scale.repeat_interleave(128, 0).repeat_interleave(128, 1) if scale.dim() == 2 else scale[:, None]
    expected = x.float() @ (w.float() * rows[:160, :300]).t() + bias.bfloat16().float()
    y = torch.empty(4, 160, dtype=torch.bfloat16)
    with torch.no_grad():
        for out in (linear_fp8(x, w, scale, bias.bfloat16()), linear_fp8(x, w, scale, bias.bfloat16(), y=y)):
            torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.5)
        assert out is y
        empty = linear_fp8(x[:, :0], w[:, :0], scale[:, :0] if scale.dim() == 2 else scale, bias.bfloat16())
        assert torch.equal(empty, bias.bfloat16().expand(4, 160))
    added = [record.message for record in caplog.records if "is added after the product" in record.message]
    assert len(added) == (scale.dim() == 2)
