"""Prepared forms of weights: made once, valid for the weight, freed with it, never made inside a graph."""

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from gemmpipe.backends.aten import Torch
from gemmpipe.backends.scaled_mm import ScaledMm, weight_scales
from gemmpipe.core.data import Candidate
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.core.errors import UserError
from gemmpipe.family import KernelDefaults, Weights, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.runtime import gemm_a4w4_blockscale, gemm_a8w8, gemm_a16w16, prepare_weight, release_prepared, reload
from gemmpipe.runtime.binding import cached_form, generic_call, is_capturing
from gemmpipe.runtime.dispatch import dispatch_of
from gemmpipe.runtime.select import RunnableCandidate
from gemmpipe.runtime.weight_cache import WEIGHT_CACHE
from gemmpipe.tables.store import render

PACKED, COPY, MM = {"method": "float32_packed"}, {"method": "float32_copy"}, {"method": "mm"}


@pytest.fixture(autouse=True)
def tuned(row, table) -> None:
    table(row(1, "torch", COPY), row(4, "onednn", PACKED), row(8, "onednn", PACKED), row(16, "torch", MM))


def agree(x: torch.Tensor, w: torch.Tensor) -> None:
    torch.testing.assert_close(gemm_a16w16(x, w).float(), linear(x.float(), w.float()), atol=0.02, rtol=0.02)


def test_made_once_and_released_with_the_weight(x, w) -> None:
    w = w.clone()  # the fixture keeps its own
    for rows in (4, 4, 8, 16):
        agree(x(rows), w)
        agree(x(rows), w.view(w.shape))  # the same memory by another name
    (entry,) = WEIGHT_CACHE.entries.values()
    form = weakref.ref(entry.extra)
    view = w[:32]
    del entry, w
    gc.collect()
    assert form() is not None, "the view keeps the memory alive"
    del view
    gc.collect()
    assert WEIGHT_CACHE.entries == {}
    assert form() is None


def test_two_weights_of_one_shape_are_not_mixed_up(x, w) -> None:
    other = -w
    for weight in (w, other, w):
        agree(x(4), weight)
    square = torch.randn(96, 96).bfloat16()
    both = square, square.t()
    for weight in both:
        gemm_a16w16(x(4), weight)
    assert len(WEIGHT_CACHE.entries) == 2


def test_ahead_of_the_first_call(x, w) -> None:
    assert prepare_weight(w) == 2
    forms = list(WEIGHT_CACHE.entries.values())
    agree(x(4), w)
    agree(x(1), w)
    assert list(WEIGHT_CACHE.entries.values()) == forms
    assert release_prepared(w[3:5]) == 2
    assert WEIGHT_CACHE.entries == {}
    assert prepare_weight(w) == 2
    assert prepare_weight(torch.randn(7, 96).bfloat16()) == 0


def test_what_is_no_weight_has_no_forms() -> None:
    assert prepare_weight(torch.ones(3)) == release_prepared(torch.ones(3)) == prepare_weight(torch.ones(3, 3)) == 0


def test_a_reload_that_torch_counts_is_seen(x, w) -> None:
    layer = torch.nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        agree(x(4), layer.weight)
        layer.load_state_dict({"weight": w})
        agree(x(4), layer.weight)
        layer.weight.mul_(2)
        agree(x(4), layer.weight)


def test_a_reload_that_torch_does_not_count_needs_forget(x, w) -> None:
    with torch.inference_mode():
        weight = w.clone()
        agree(x(4), weight)
        weight.copy_(-w)
        assert release_prepared(weight) == 1
        agree(x(4), weight)
    layer = torch.nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        agree(x(4), layer.weight)
        layer.weight.data.copy_(w)
        assert release_prepared(layer.weight) == 1
        agree(x(4), layer.weight)


def test_inside_a_capture_nothing_is_prepared(x, w, monkeypatch, caplog) -> None:
    agree(x(4), -w)
    held = dict(WEIGHT_CACHE.entries)
    monkeypatch.setattr("gemmpipe.runtime.binding.is_capturing", lambda device: True)
    agree(x(4), w)  # its key has a call, its weight has no form
    agree(x(8), w)
    assert {**WEIGHT_CACHE.entries} == held
    assert [record.getMessage().count("captured in a graph before") for record in caplog.records] == [1, 1]
    kept = len(dispatch_of("a16w16").calls)
    monkeypatch.setattr("gemmpipe.runtime.binding.is_capturing", is_capturing)
    agree(x(8), w)
    assert len(WEIGHT_CACHE.entries) == 1 + len(held)
    assert len(dispatch_of("a16w16").calls) == kept + 1


def test_new_scales_at_the_address_of_old_ones_are_distinguished() -> None:
    """Newly loaded scales often have the old address, and torch does not count their changes."""
    memory = bytearray(64)
    w, before = torch.ones(4, 4), torch.frombuffer(memory, dtype=torch.float32)
    candidate = Candidate.of("torch", {"method": "float32_copy"})
    WEIGHT_CACHE.add(candidate, Weights(w=w, w_scale=before), torch.ones(4, 4))
    assert WEIGHT_CACHE.find(candidate, Weights(w=w, w_scale=before.view(16))) is not None
    after = torch.frombuffer(memory, dtype=torch.float32)
    assert after.data_ptr() == before.data_ptr()
    assert WEIGHT_CACHE.find(candidate, Weights(w=w, w_scale=after)) is None
    del before
    gc.collect()
    assert not WEIGHT_CACHE.entries


@pytest.mark.parametrize("graph_pool", [False, True])
def test_a_form_is_complete_before_another_stream_can_find_it(
    monkeypatch: pytest.MonkeyPatch, graph_pool: bool
) -> None:
    happened: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            happened.append("complete" if not WEIGHT_CACHE.entries else "too late")

    monkeypatch.setattr("gemmpipe.runtime.binding.is_capturing", lambda device: False)
    monkeypatch.setattr("torch.cuda.current_stream", lambda index: Stream())
    family, device, weight = load_family("a16w16"), arch_device("sm_90"), torch.ones(64, 96).bfloat16()
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": 4, "N": 64, "K": 96}, defaults, device.gfx, "case"))
    chosen = RunnableCandidate(implementation=Torch(), candidate=Candidate.of("torch", COPY))
    weights = Weights(w=weight)
    for _ in range(2):
        cached_form(chosen, spec, weights, device, graph_pool=graph_pool)
    assert len(WEIGHT_CACHE.entries) == 1
    assert happened == ([] if graph_pool else ["complete"]), (
        "for a graph pool it is made and synchronised in another thread"
    )


FP8, SCALED = torch.float8_e4m3fn, {"N": 256, "K": 384, "outdtype": "bfloat16"}


@pytest.fixture
def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A tuned row of a candidate that makes a bf16 copy."""

    def write(name: str, **key: object) -> None:
        device, path = cpu_device(), tmp_path / f"{name}.csv"
        row = {"gfx": device.gfx, "cu_num": device.cu_num, "M": 4, **SCALED, **key, "libtype": "torch", "us": 1.0}
        path.write_text(render([{**row, "config": json.dumps({"method": "bfloat16_copy"})}], load_family(name), ()))
        monkeypatch.setenv(f"GEMMPIPE_CONFIG_{name.upper()}", str(path))
        reload()

    return write


def test_rows_of_another_type_or_with_other_scales_want_nothing(scaled: Callable[..., None]) -> None:
    w, by_block, by_row = torch.ones(256, 384).to(FP8), torch.ones(2, 3), torch.ones(256)
    scaled("a8w8", q_dtype_w="int8", granularity="row", bias=False)
    assert prepare_weight(w, by_row) == prepare_weight(w, by_block) == 0
    scaled("a8w8", q_dtype_w="float8_e4m3fn", granularity="row", bias=False)
    assert prepare_weight(w, by_block) == prepare_weight(w) == 0
    assert prepare_weight(w, by_row) == 1
    gemm_a8w8(torch.ones(4, 384).to(FP8), w, torch.ones(4, 1), by_row)
    assert len(WEIGHT_CACHE.entries) == 1, "the call finds it for any shape of its scales"


@pytest.mark.parametrize("as_bytes", [False, True])
def test_weights_of_two_elements_a_byte_are_prepared(scaled: Callable[..., None], as_bytes: bool) -> None:
    scaled("a4w4_blockscale")
    x, w = torch.zeros(4, 192, dtype=torch.uint8), torch.zeros(256, 192, dtype=torch.uint8)
    scales = torch.full((4, 12), 127, dtype=torch.uint8), torch.full((256, 12), 127, dtype=torch.uint8)
    ahead = (w, scales[1]) if as_bytes else (w.view(torch.float4_e2m1fn_x2), scales[1].view(torch.float8_e8m0fnu))
    assert prepare_weight(*ahead) == 1
    gemm_a4w4_blockscale(x, w, *scales)
    assert len(WEIGHT_CACHE.entries) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: prepare_weight(3), "prepare_weight: weight is of type int, expected a tensor"),
        (lambda: prepare_weight(None), "prepare_weight: weight is None, expected a tensor"),
        (
            lambda: prepare_weight(torch.ones(2, 2), 7),
            "prepare_weight: w_scale is of type int, expected a tensor or None",
        ),
        (lambda: release_prepared("x"), "release_prepared: weight is of type str, expected a tensor"),
    ],
)
def test_an_argument_that_is_no_tensor_is_reported(call: Callable[[], int], message: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_a_library_that_reads_stored_scales_is_captured_after_its_first_call(granularity: str, monkeypatch) -> None:
    """`scaled_mm` of scales by row prepares nothing: a graph takes it, as it does the dispatcher's own kernels."""
    family, device = load_family("a8w8"), arch_device("sm_90")
    defaults = KernelDefaults(dtype="float8_e4m3fn", out_dtype=None, bias=None)
    key = {"M": 32, "N": 64, "K": 128, "granularity": granularity}
    spec = family.spec(make_problem(family, key, defaults, device.gfx, "case"))
    weights = family.make_weights(spec, torch.Generator().manual_seed(1))
    runnable = RunnableCandidate(
        implementation=ScaledMm(), candidate=Candidate.of("scaled_mm", {"use_fast_accum": False})
    )
    monkeypatch.setattr("gemmpipe.runtime.binding._synchronized", lambda make, device: make())
    monkeypatch.setattr("gemmpipe.runtime.binding.is_capturing", lambda device: capturing)
    monkeypatch.setattr("gemmpipe.runtime.binding.device_context", lambda device: torch.no_grad())
    seen = []

    def bind(self, spec, knobs, device, inputs, prepared, out):  # the operator itself needs a GPU
        seen.append(weight_scales(prepared))
        return lambda: out

    monkeypatch.setattr(ScaledMm, "bind", bind)
    call = generic_call(runnable, spec, device, torch.bfloat16)
    inputs = family.make_inputs(spec, torch.Generator().manual_seed(2))
    for capturing in (False, True):  # noqa: B007 (read by is_capturing)
        call(inputs.x, weights.w, inputs.x_scale, weights.w_scale, None)
    assert [scales.data_ptr() for scales in seen] == [weights.w_scale.data_ptr()] * 2
