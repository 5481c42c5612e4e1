"""Engines' functions with a given configuration: found without importing, called, and left unchanged."""

import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gemmpipe.backends import engine_moe, library_backends
from gemmpipe.backends.engine import EngineBackend, EngineProduct
from gemmpipe.backends.engine_functions import GEMM_FUNCTIONS, EngineFunction
from gemmpipe.core.data import Device
from gemmpipe.core.device import cpu_device
from gemmpipe.family import Family, KernelDefaults, load_family
from gemmpipe.family.operands import make_inputs, make_weights
from gemmpipe.family.problem import make_problem
from gemmpipe.formats.engine_json import Sglang, Vllm

MODULE = '''
"""An engine of a test: its function multiplies, and records the configuration that it took."""
import torch

SEEN = []

def lookup(n, k, rows, columns):
    return {16: {"BLOCK_SIZE_M": 16}, 64: {"BLOCK_SIZE_M": 64}}

def multiply(x, w, x_scale, w_scale, block, dtype):
    configs = lookup(w.shape[0], w.shape[1], *block)
    SEEN.append(configs[min(configs.keys(), key=lambda each: abs(each - x.shape[0]))])
    assert x_scale.is_contiguous()
    x_wide = x.float() * x_scale.repeat_interleave(block[1], 1)[:, : x.shape[1]]
    w_all = w_scale.repeat_interleave(block[0], 0)[: w.shape[0]].repeat_interleave(block[1], 1)[:, : w.shape[1]]
    return (x_wide @ (w.float() * w_all).T).to(dtype)
'''


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineFunction]:
    """A function of a package that is importable in the test only."""
    package = f"engine_{tmp_path.name}"  # imported modules are cached
    folder = tmp_path / package / "layers"
    (folder / "configs").mkdir(parents=True)
    for path in (folder, folder.parent):
        (path / "__init__.py").write_text("")
    (folder / "products.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield EngineFunction(
        package=package,
        module=f"{package}.layers.products",
        function="multiply",
        lookup="lookup",
        default_items=(("BLOCK_SIZE_M", 64),),
    )
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


@pytest.fixture
def scaled() -> Family:
    return load_family("a8w8_blockscale")


def test_its_folder_is_found_without_importing_it(function: EngineFunction) -> None:
    (folder,) = function.folders()
    assert folder.name == "configs"
    assert function.module not in sys.modules
    missing = replace(function, package="no_such_engine", module="no_such_engine.x")
    assert missing.folders() == ()
    assert missing.unavailable_reason() == "the package no_such_engine is not installed"


def test_an_engine_that_cannot_be_imported_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brokenengine.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    broken = EngineFunction(package="brokenengine", module="brokenengine", function="f", lookup="g", default_items=())
    assert str(broken.unavailable_reason()).startswith("brokenengine cannot be imported: ModuleNotFoundError")


@pytest.mark.parametrize(("m", "n", "k"), [(5, 144, 300), (64, 128, 256)])
def test_the_function_runs_with_the_configuration_given(
    function: EngineFunction, scaled: Family, m: int, n: int, k: int
) -> None:
    options = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    problem = make_problem(scaled, {"M": m, "N": n, "K": k}, options, "sm_90", "test")
    spec, device = scaled.spec(problem), cpu_device()
    generator = torch.Generator().manual_seed(3)
    weights, inputs = make_weights(spec, generator), make_inputs(spec, generator)
    own = EngineProduct(kernel=scaled.engine_kernels["vllm"], function=function)
    final = own.finals_implementation()
    knobs = {"BLOCK_SIZE_M": 32, "num_warps": 8}
    out = torch.full(spec.out_shape, float("nan"), dtype=torch.bfloat16)
    launch = final.bind(spec, knobs, device, inputs, final.prepare(spec, weights, knobs), out)
    module = sys.modules[function.module]
    before = module.lookup
    result = launch()
    assert [knobs] == module.SEEN, "not the file's"
    assert module.lookup is before
    reference = scaled.reference(spec, inputs, weights)
    torch.testing.assert_close(result.float(), reference, rtol=0.02, atol=0.02 * float(reference.std()))


def test_a_function_that_configures_itself(
    function: EngineFunction, scaled: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own look-up answers, at the nearest M of its file; scales of x in columns are copied into rows."""
    monkeypatch.setitem(GEMM_FUNCTIONS, "vllm", function)
    own, device = library_backends()["vllm_function"], cpu_device()
    options = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    for m, rows in ((1, 16), (60, 64)):
        spec = scaled.spec(make_problem(scaled, {"M": m, "N": 144, "K": 300}, options, "sm_90", "test"))
        generator = torch.Generator().manual_seed(m)
        weights, inputs = make_weights(spec, generator), make_inputs(spec, generator)
        assert inputs.x_scale is not None
        column = inputs.x_scale.t().contiguous().t()
        assert own.unsupported_reason(spec, {}, device) is None
        out = torch.full(spec.out_shape, float("nan"), dtype=torch.bfloat16)
        given = replace(inputs, x_scale=column)
        result = own.bind(spec, {}, device, given, own.prepare(spec, weights, {}), out)()
        assert sys.modules[function.module].SEEN[-1] == {"BLOCK_SIZE_M": rows}
        reference = scaled.reference(spec, inputs, weights)
        torch.testing.assert_close(result.float(), reference, rtol=0.02, atol=0.02 * float(reference.std()))


def test_experts_without_knobs_are_configured_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    reason_of = engine_moe.unavailable_reason
    monkeypatch.setattr(engine_moe, "unavailable_reason", lambda label: None if label == "vllm" else reason_of(label))
    monkeypatch.setattr(engine_moe, "_vllm_call", lambda *given: lambda: called.append(given))
    monkeypatch.setitem(sys.modules, engine_moe._MODULES["vllm"], None)  # whose override must not be asked for
    family, own = load_family("fmoe"), library_backends()["vllm_function"]
    for dtype, inner, reason in (
        (None, 96, None),
        ("float8_e4m3fn", 256, None),
        ("float8_e4m3fn", 96, "quantiser: whole groups of 128, not 256 and 96"),
    ):
        options = KernelDefaults(dtype=dtype, out_dtype=None, bias=None)
        key = {"token": 3, "model_dim": 256, "inter_dim": inner, "expert": 4, "topk": 2}
        spec = family.spec(make_problem(family, key, options, "sm_90", "test"))
        assert own.unsupported_reason(spec, {}, cpu_device()) == reason
        weights = family.make_weights(spec, torch.Generator().manual_seed(1))
        inputs = family.make_inputs(spec, torch.Generator().manual_seed(2))
        own.bind(spec, {}, cpu_device(), inputs, own.prepare(spec, weights, {}), torch.empty(spec.out_shape))()
        assert called.pop() == (spec, inputs, weights)
        assert "server" in str(library_backends()["sglang_function"].unsupported_reason(spec, {}, cpu_device()))


def test_a_call_that_fails_leaves_the_look_up_as_it_was(function: EngineFunction) -> None:
    launch = function.launch((None, None, None, None), [128, 128], torch.bfloat16, {})
    module = sys.modules[function.module]
    before = module.lookup
    with pytest.raises(AttributeError):
        launch()
    assert module.lookup is before


@pytest.mark.parametrize("form", [Vllm(device_name=None), Sglang(device_name=None)])
def test_a_format_brings_its_engine(form: Vllm | Sglang, scaled: Family, h200: Device) -> None:
    (found,) = form.engine().implementations(scaled)
    assert found.label == form.name
    assert pickle.loads(pickle.dumps(found)) == found, "search processes and workers are sent it"
    options = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = scaled.spec(make_problem(scaled, {"M": 4, "N": 256, "K": 512}, options, "sm_90", "test"))
    default = found.default(spec, h200)
    assert default is not None
    assert found.unsupported_reason(spec, found.normalise(spec, default, h200), h200) is None
    assert set(default) <= set(form.accepted)
    assert set(found.knob_names(spec, h200) or ()) <= set(form.accepted)


def test_an_engine_has_nothing_for_other_families() -> None:
    for engine in GEMM_FUNCTIONS:
        assert EngineBackend(engine=engine).implementations(load_family("a16w16")) == ()
