"""The products that a watcher counts where torch executes them: every operator, each once."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.runtime import fused_moe, gemm_a8w8_blockscale, gemm_a16w16, reload
from gemmpipe.runtime.capture.recorder import Recorder, recorder_for
from gemmpipe.runtime.capture.watcher import Watcher
from gemmpipe.sources.profile import TraceShapes
from gemmpipe.sources.table import CsvShapes


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setenv("GEMMPIPE_CAPTURE", str(tmp_path / "seen.csv"))
    reload()
    return recorder_for(tmp_path / "seen.csv")


@pytest.mark.compile
def test_entry_points_count_themselves_once(seen: Recorder, x, w) -> None:
    with torch.no_grad(), Watcher(seen):
        for rows in ((4,), (2, 2), (0,)):
            gemm_a16w16(x(*rows), w)
        with torch.enable_grad():
            gemm_a16w16(x(7).requires_grad_(), w)
        x8, w8 = x(4).to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
        gemm_a8w8_blockscale(x8, w8, torch.ones(4, 1), torch.ones(1, 1))
        torch.compile(gemm_a16w16, fullgraph=True, backend="eager")(x(5), w)
    seen.flush()
    found = {(row["family"], row["op"], row["M"]): row["count"] for row in read(seen.path)}
    assert found == {
        ("a16w16", "gemm_a16w16", "4"): "2",
        ("a8w8_blockscale", "gemm_a8w8_blockscale", "4"): "1",
        ("a16w16", "gemm_a16w16", "5"): "1",
        ("a16w16", "gemm_a16w16", "7"): "1",
    }


def test_experts_count_themselves_once_however_often_they_are_called(seen: Recorder) -> None:
    x, w1, w2 = (torch.ones(*sizes).bfloat16() for sizes in ((3, 32), (4, 32, 32), (4, 32, 16)))
    ids = torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=torch.int32)
    with torch.no_grad(), Watcher(seen):
        for rows in (3, 3, 3, 0):
            fused_moe(x[:rows], w1, w2, torch.ones(rows, 2), ids[:rows])
    seen.flush()
    assert [(row["family"], row["op"], row["count"]) for row in read(seen.path)] == [("fmoe", "fused_moe", "3")]


def test_every_kind_of_product(seen: Recorder) -> None:
    x, w = torch.randn(16, 32), torch.randn(48, 32)
    wide, experts = x.bfloat16(), torch.randn(2, 32, 48).bfloat16()
    x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    one = torch.ones(1)
    with torch.no_grad(), Watcher(seen):
        torch.addmm(torch.ones(48), x, w.t())
        torch.addmm(torch.ones(16, 48), x, w.t())
        torch.baddbmm(torch.ones(2, 16, 48), x.expand(2, 16, 32), w.t().expand(2, 32, 48))
        torch.nn.functional.linear(x[0], w)
        torch._int_mm(x.to(torch.int8), w.to(torch.int8).t())
        torch._scaled_mm(x8, w8.t(), one, one, out_dtype=torch.bfloat16)
        torch.matmul(wide.repeat(2, 3, 1, 1), w.bfloat16().t())
        torch.matmul(wide.expand(2, 3, 16, 32), experts[0].expand(2, 3, 32, 48))
        torch.einsum("mk,nk->mn", wide, w.bfloat16())
        torch.nn.functional.grouped_mm(wide, experts, offs=torch.tensor([4, 16], dtype=torch.int32))
    seen.flush()
    rows = [(row["op"], row["family"], row["bias"], row["granularity"]) for row in read(seen.path)]
    assert rows[:2] == [("addmm", "other", "True", ""), ("addmm", "other", "False", "")]
    assert rows[2][:2] == ("baddbmm", "other")
    assert rows[3][0] in ("mv", "mm", "linear", "addmm")
    assert rows[4:6] == [("_int_mm", "a8w8", "", ""), ("_scaled_mm", "a8w8", "False", "tensor")]
    several = [tuple(row[name] for name in ("op", "family", "B", "M", "N", "K")) for row in read(seen.path)][6:]
    assert several[0][1:] == ("a16w16", "", "96", "48", "32")
    assert several[1] == ("bmm", "batched_bf16", "6", "16", "48", "32")
    assert several[2][3:] == ("16", "48", "32")
    assert several[3:] == [("_grouped_mm", "other", "2", "16", "48", "32")]


def test_in_inference_mode_where_operators_come_whole(seen: Recorder) -> None:
    x, w = torch.randn(2, 16, 32).bfloat16(), torch.randn(48, 32).bfloat16()
    with torch.inference_mode(), Watcher(seen), sdpa_kernel(SDPBackend.MATH):
        torch.einsum("bmk,nk->bmn", x, w)
        torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])
        torch.tensordot(x, w, dims=([2], [1]))
    seen.flush()
    found = [tuple(row[name] for name in ("B", "M", "N", "K", "count")) for row in read(seen.path)]
    assert found == [
        ("1", "32", "48", "32", "1"),
        ("2", "16", "16", "32", "1"),
        ("2", "16", "32", "16", "1"),
        ("", "32", "48", "32", "1"),
    ]


@pytest.fixture(scope="module")
def own_operators() -> Iterator[Any]:
    """Custom operators: Python or composite, with products inside or as an opaque kernel."""
    library = torch.library.Library("gemmpipe_test", "DEF")
    bodies = {
        "block": ("Tensor x, Tensor w", lambda x, w: torch.nn.functional.linear(x, w).relu() @ w),
        "inner": ("Tensor x, Tensor w", lambda x, w: x @ w.t()),
        "outer": ("Tensor[] xs, Tensor w", lambda xs, w: torch.ops.gemmpipe_test.inner(xs[0], w)),
        "block_fp8_matmul": (
            "Tensor x, Tensor w, Tensor x_scale, Tensor w_scale",
            lambda x, w, x_scale, w_scale: x.new_zeros(len(x), len(w), dtype=torch.float16),
        ),
        "my_gemm": ("Tensor x, Tensor w", lambda x, w: x @ w.t()),
    }
    for name, (signature, body) in bodies.items():
        library.define(f"{name}({signature}) -> Tensor")
        library.impl(name, body, "CPU")
    library.define("whole(Tensor x, Tensor w) -> Tensor")
    library.impl("whole", lambda x, w: torch.nn.functional.linear(x, w), "CompositeImplicitAutograd")
    yield torch.ops.gemmpipe_test
    library._destroy()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_operators_of_someones_own(seen: Recorder, own_operators: Any, mode: Callable[[], Any]) -> None:
    x, w = torch.randn(16, 256).bfloat16(), torch.randn(128, 256).bfloat16()
    x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    with mode():
        expected = own_operators.block(x, w)
        with Watcher(seen):
            assert torch.equal(own_operators.block(x, w), expected)
            own_operators.outer([x[:3]], w)
            own_operators.whole(x[:5], w)
            own_operators.my_gemm(x[:7], w)
            own_operators.block_fp8_matmul(x8, w8, torch.ones(16, 2), torch.ones(1, 2))
    seen.flush()
    found = [tuple(row[name] for name in ("family", "M", "N", "K", "outdtype", "count")) for row in read(seen.path)]
    assert found == [
        ("a16w16", "16", "128", "256", "bfloat16", "1"),
        ("a16w16", "16", "256", "128", "bfloat16", "1"),
        ("a16w16", "3", "128", "256", "bfloat16", "1"),
        ("a16w16", "5", "128", "256", "bfloat16", "1"),
        ("a16w16", "7", "128", "256", "bfloat16", "1"),
        ("a8w8_blockscale", "16", "128", "256", "float16", "1"),
    ]


def test_gradients_go_through_decomposed_operators(seen: Recorder) -> None:
    @torch.library.custom_op("gemmpipe_test_grad::product", mutates_args=())
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    product.register_autograd(
        lambda ctx, grad: (grad @ ctx.saved_tensors[0].t(), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 6)
    product(x, w).sum().backward()
    expected, x.grad = x.grad, None
    with Watcher(seen):
        product(x, w).sum().backward()
    assert torch.equal(x.grad, expected)
    seen.flush()
    assert [(row["M"], row["N"], row["K"]) for row in read(seen.path)] == [("4", "6", "8"), ("4", "8", "6")]


def test_an_export_computes_nothing_and_what_it_made_does(seen: Recorder) -> None:
    layer, x = torch.nn.Sequential(torch.nn.Linear(32, 8)).bfloat16(), torch.randn(5, 32).bfloat16()
    with torch.no_grad():
        expected = layer(x)
        with Watcher(seen):
            exported = torch.export.export(layer, (x,)).module()
            assert not seen.counts
            assert torch.equal(exported(x), expected)
    seen.flush()
    assert [(row["M"], row["N"], row["K"], row["count"]) for row in read(seen.path)] == [("5", "8", "32", "1")]


def test_fused_layers_of_torchs_own(seen: Recorder) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).bfloat16().eval()
    with torch.no_grad(), Watcher(seen):
        layer(torch.randn(2, 8, 32).bfloat16())
    assert torch.backends.mha.get_fastpath_enabled()
    seen.flush()
    found = {row["layer"]: tuple(row[name] for name in ("M", "N", "K")) for row in read(seen.path)}
    assert found["linear1"] == ("16", "64", "32")
    assert found["linear2"] == ("16", "32", "64")
    assert ("16", "96", "32") in [tuple(row[name] for name in ("M", "N", "K")) for row in read(seen.path)]


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:Using .torch.compile:UserWarning")
def test_in_place_and_into_a_tensor(seen: Recorder) -> None:
    x, w = torch.randn(16, 32).bfloat16(), torch.randn(32, 48).bfloat16()
    out, outs = torch.zeros(16, 48).bfloat16(), torch.zeros(2, 16, 48).bfloat16()
    with torch.no_grad(), Watcher(seen):
        torch.mm(x, w, out=out)
        out.addmm_(x, w)
        torch._addmm_activation(out[0], x, w, use_gelu=True)
        outs.baddbmm_(x.expand(2, 16, 32), w.expand(2, 32, 48))
        torch.addbmm(out, x.expand(2, 16, 32), w.expand(2, 32, 48))
        torch.compile(torch.nn.Sequential(torch.nn.Linear(32, 8)).bfloat16())(x)
    seen.flush()
    found = [tuple(row[name] for name in ("op", "family", "B", "layer")) for row in read(seen.path)]
    assert found == [
        ("mm", "a16w16", "", ""),
        ("addmm", "a16w16", "", ""),
        ("_addmm_activation", "a16w16", "", ""),
        ("baddbmm", "batched_bf16", "2", ""),
        ("addbmm", "batched_bf16", "2", ""),
        ("addmm", "a16w16", "", "0"),
    ]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_capture_holds_what_a_trace_of_the_program_does(
    seen: Recorder, own_operators: Any, mode: Callable[[], Any], tmp_path: Path
) -> None:
    layer = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32, bias=False)
    ).bfloat16()
    x, w = torch.randn(2, 8, 32).bfloat16(), torch.randn(32, 32).bfloat16()

    def program() -> None:
        torch.nn.functional.scaled_dot_product_attention(*[layer(x)[None]] * 3)
        own_operators.block(x[0], w)
        own_operators.my_gemm(x[1], w)
        torch.einsum("bmk,kn->bmn", x, w)

    path = tmp_path / "trace.json"
    with mode(), sdpa_kernel(SDPBackend.MATH):
        with torch.profiler.profile(record_shapes=True) as profile:
            program()
        with Watcher(seen):
            program()
    profile.export_chrome_trace(str(path))
    seen.flush()
    traced = TraceShapes(path=str(path), rows_of=None, nsets=None)
    for family in map(load_family, ("a16w16", "batched_bf16")):
        defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
        captured = CsvShapes(path=str(seen.path), rows_of=None).problems(family, defaults, "sm_90")
        expected = {problem.id: problem.weight for problem in traced.problems(family, defaults, "sm_90")}
        assert {problem.id: problem.weight for problem in captured} == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graphs_products_count_when_it_is_captured(seen: Recorder) -> None:
    linear = torch.nn.Linear(64, 128, device="cuda", dtype=torch.bfloat16)
    x = torch.ones(16, 64, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        linear(x)  # libraries begin outside of graphs
        with Watcher(seen):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                linear(x)
            for _ in range(3):
                graph.replay()
    torch.cuda.synchronize()
    seen.flush()
    assert [(row["M"], row["N"], row["count"]) for row in read(seen.path)] == [("16", "128", "1")]
