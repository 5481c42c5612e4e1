"""A model with dispatched linear layers, and the undo."""

import copy
import pickle

import pytest
import torch
from torch import nn

import gemmpipe
from gemmpipe.core.errors import UserError
from gemmpipe.runtime.selection_log import LOG


class Model(nn.Module):
    """Two layers with rows, one without, and two that are no plain linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.again = nn.Linear(96, 64, bias=False), nn.Linear(96, 64, bias=True)
        self.other = nn.Linear(64, 96)
        self.own = _Doubled(96, 64, bias=False)
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x) + self.again(x) + self.own(x)
        return self.other(y)


class _Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.fixture
def model(row, table) -> Model:
    packed = {"method": "float32_packed"}
    table(row(4, "onednn", packed), row(16, "onednn", packed, bias=True), row(9, "cublaslt", packed, N=96, K=64))
    torch.manual_seed(1)
    return Model()


def test_replaces_counts_and_undoes(model: Model, x) -> None:
    with torch.inference_mode():
        before = model(x(2, 2))
        with gemmpipe.patch(model) as patched:
            assert patched.replaced == 2
            assert str(patched) == "gemmpipe: 2 of 4 linear layers use tuned products"
            assert set(patched.layers) == {"up", "again"}
            assert set(patched.left_out) == {"other", "own"}
            again = gemmpipe.patch(model)
            assert again.replaced == 0
            assert str(again).startswith(
                "gemmpipe: 0 of 4 linear layers use tuned products: patched already (2 layers); "
            )
            assert again.left_out["own"] == "a forward of its own (_Doubled)"
            torch.testing.assert_close(model(x(2, 2)), before, atol=0.05, rtol=0.05)
            assert LOG.padded["a16w16"] == 1
            assert model(x(17)).shape == (17, 96)
        assert {type(layer) for layer in (model.up, model.again)} == {nn.Linear}
        assert torch.equal(model(x(2, 2)), before)
        patched.undo()


def test_it_says_why_no_layer_is_replaced(row, table) -> None:
    def printed(model: nn.Module) -> str:
        head, _, why = str(gemmpipe.patch(model)).partition(": 0 of 1 linear layers use tuned products")
        assert head == "gemmpipe"
        return why

    table(row(4, "onednn", {"method": "float32_packed"}), row(4, "cublaslt", {}, N=32))
    wide = nn.Sequential(nn.Linear(96, 64, bias=False))
    assert printed(wide) == ": a weight in float32; expected bfloat16 or float16 (1 layer)"
    other = nn.Sequential(nn.Linear(128, 64, bias=False).bfloat16())
    assert printed(other) == ": N=64 K=128 bias=False dtype=bfloat16: no row; tune it (1 layer)"
    lost = nn.Sequential(nn.Linear(96, 32, bias=False).bfloat16())  # of a library of GPUs
    assert "N=32 K=96 bias=False dtype=bfloat16: its rows name candidates that cannot run here" in printed(lost)
    on_meta = nn.Sequential(nn.Linear(96, 64, bias=False, device="meta"))
    assert printed(on_meta) == ": a weight on the device 'meta' (1 layer)"
    assert str(gemmpipe.patch(nn.Sequential())) == "gemmpipe: 0 of 0 linear layers use tuned products"
    table(row(4, "onednn", {"method": "float32_packed"}, gfx="sm_90"))
    assert "in any table; GEMMPIPE_CONFIG_A16W16 names no table with one (1 layer)" in printed(wide.bfloat16())


def test_training_works_as_before(model: Model, x) -> None:
    gemmpipe.patch(model)
    model(x(4)).sum().backward()
    assert model.up.weight.grad is not None


@pytest.mark.compile
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_model_may_change_its_type_while_it_is_patched(model: Model, x, dtype: torch.dtype) -> None:
    with torch.no_grad(), gemmpipe.patch(model):
        out = model.to(dtype)(x(4).to(dtype))
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x(4).to(dtype))
    with torch.no_grad():
        expected = model(x(4).to(dtype))
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.05)
    torch.testing.assert_close(compiled, expected, atol=0.05, rtol=0.05)


@pytest.mark.compile
def test_a_patched_model_compiles_copies_and_pickles(model: Model, x) -> None:
    expected = model(x(4))
    gemmpipe.patch(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.up.weight.zero_()
        assert not torch.equal(twin(x(4)), expected), "the copy has its own weights"
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x(4)), expected, atol=0.05, rtol=0.05)
    assert torch.equal(pickle.loads(pickle.dumps(model.up))(x(4)), model.up(x(4)))


@pytest.mark.compile
def test_a_compiled_model_is_patched_and_undone_too(model: Model, x) -> None:
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        before = compiled(x(4))
        with gemmpipe.patch(model):
            LOG.clear()
            torch.testing.assert_close(compiled(x(4)), before, atol=0.05, rtol=0.05)
            assert set(LOG.steps.values()) == {"exact", "padded"}
        LOG.clear()
        assert torch.equal(compiled(x(4)), before)
        assert not LOG.steps


@pytest.mark.compile
def test_layers_of_one_shape_are_compiled_once(row, table, x) -> None:
    table(row(4, "onednn", {"method": "float32_packed"}, K=96, N=96))
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(12))).bfloat16()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    assert gemmpipe.patch(model).replaced == 12
    torch.compiler.reset()
    with torch.no_grad():
        expected = model(x(4))
        for layer in model:
            layer.compile(fullgraph=True, backend=count)
        torch.testing.assert_close(model(x(4)), expected)
    assert len(graphs) == 1


def test_a_model_without_rows_is_left_alone(x) -> None:
    assert gemmpipe.patch(nn.Linear(8, 8)).replaced == 0
    with pytest.raises(AttributeError, match="no attribute 'patches'"):
        gemmpipe.patches  # noqa: B018


def test_a_hugging_face_model_from_a_config(row, table) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    packed = {"method": "float32_packed"}
    shapes = ((96, 96), (48, 96), (128, 96), (96, 128))
    table(*(row(m, "onednn", packed, N=n, K=k) for n, k in shapes for m in (1, 8)))
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    tokens = torch.arange(8)[None]
    with torch.inference_mode():
        before = model(tokens).logits
        with gemmpipe.patch(model) as patched:
            assert patched.replaced == patched.linear_layers == 15
            torch.testing.assert_close(model(tokens).logits, before, atol=0.05, rtol=0.05)
        assert torch.equal(model(tokens).logits, before)


@pytest.mark.parametrize("wrong", [3, None, nn.Linear])
def test_an_argument_that_is_no_module_is_reported(wrong: object) -> None:
    with pytest.raises(UserError, match=r"^patch: model is of type \w+, expected a torch.nn.Module$"):
        gemmpipe.patch(wrong)  # type: ignore[arg-type]
