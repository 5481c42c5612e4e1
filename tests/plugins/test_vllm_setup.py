"""The plug-in's entry point without a usable vLLM: it does nothing, says why in one line, and never raises."""

import logging
import sys
import tomllib
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from gemmpipe.launch.replays import restore_replays
from gemmpipe.plugins import vllm as plugin
from gemmpipe.plugins.scope import read_scope
from gemmpipe.plugins.tuned_products import tables_digest


@pytest.fixture(autouse=True)
def first_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plugin._DONE.clear()
    monkeypatch.setattr(plugin._LOG, "disabled", False)  # Hydra's set-up of logging disables all loggers
    yield
    plugin._DONE.clear()


def pretend(monkeypatch: pytest.MonkeyPatch, version: str, cuda: bool = True, batch_invariant: bool = False) -> None:
    """Modules of vLLM with just what is asked before anything is installed."""
    members = {
        "vllm": {"__version__": version, "__path__": []},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cuda=lambda: cuda, device_type="cpu")},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": batch_invariant, "environment_variables": {}},
    }
    for name, values in members.items():
        made = types.ModuleType(name)
        vars(made).update(values)
        monkeypatch.setitem(sys.modules, name, made)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    with caplog.at_level(logging.INFO, logger="vllm.gemmpipe"):
        plugin.register()
        plugin.register()
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_without_vllm_it_is_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    ((level, line),) = lines(caplog)
    assert level == logging.WARNING
    assert "does nothing (set-up failed: " in line


def test_replays_alone_need_nothing_else_of_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, "0.25.1")
    monkeypatch.setenv("GEMMPIPE_VLLM", "replays")
    original = torch.cuda.CUDAGraph.replay
    try:
        ((level, line),) = lines(caplog)
        assert level == logging.INFO
        assert "takes over replays of CUDA graphs (on GPUs from sm_90 on); leaves to the engine: linear, moe" in line
        assert torch.cuda.CUDAGraph.replay is not original
    finally:
        restore_replays()
    assert torch.cuda.CUDAGraph.replay is original


@pytest.mark.parametrize(
    ("scope", "version", "cuda", "invariant", "reason"),
    [
        ("off", "0.25.1", True, False, "GEMMPIPE_VLLM=off"),
        ("linaer", "0.25.1", True, False, "GEMMPIPE_VLLM=linaer); GEMMPIPE_VLLM: 'linaer': unknown"),
        ("", "0.24.0", True, False, "version 0.24.0 is not supported, expected 0.25 to 0.33"),
        ("", "1.0.0", True, False, "version 1.0.0 is not supported, expected 0.25 to 0.33"),
        ("", "dev", True, False, "version 'dev' is unknown, expected 0.25 to 0.33"),
        ("", "0.25.1", False, False, "no CUDA platform, but cpu"),
        ("", "0.33.0", True, True, "VLLM_BATCH_INVARIANT is set"),
    ],
)
def test_reasons(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    scope: str,
    version: str,
    cuda: bool,
    invariant: bool,
    reason: str,
) -> None:
    monkeypatch.setenv("GEMMPIPE_VLLM", scope)
    pretend(monkeypatch, version, cuda, invariant)
    ((level, line),) = lines(caplog)
    assert level == logging.INFO
    assert f"in vLLM {version}: does nothing ({reason}" in line
    assert sys.modules["vllm.envs"].environment_variables == {}  # type: ignore[attr-defined]


def test_a_vllm_with_other_modules_keeps_its_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GEMMPIPE_VLLM", "linear,moe,quantise")
    pretend(monkeypatch, "0.33.9")
    for name in ("gemmpipe.plugins.vllm_linear", "gemmpipe.plugins.vllm_experts", "gemmpipe.plugins.vllm_quantise"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    *warnings, (level, line) = lines(caplog)
    assert [level for level, _ in warnings] == [logging.WARNING] * 3
    assert "left to the engine: linear: " in warnings[0][1]
    assert "left to the engine: quantise: " in warnings[2][1]
    assert (level, "does nothing (linear: " in line) == (logging.INFO, True)


@pytest.mark.parametrize("version", ["0.25.0", "0.25.1.dev3+g12", "0.29.0", "0.33.9"])
def test_supported_versions(version: str) -> None:
    assert plugin.unsupported_version(version) == ""


def test_the_cache_factor_has_the_scope_and_the_tables(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "0.25.1")
    scope = read_scope("GEMMPIPE_VLLM")
    plugin.add_cache_factor(scope)
    getter = sys.modules["vllm.envs"].environment_variables["gemmpipe_plugin"]  # type: ignore[attr-defined]
    empty = getter()
    path = rows("a16w16", "torch", {"method": "mm"}, {"M": 1, "N": 64, "K": 64})
    one = getter()
    path.write_text(path.read_text().replace("1.0", "2.0", 1))
    assert getter() == one  # once per process, as the tables are read once
    tables_digest.cache_clear()
    monkeypatch.setenv("GEMMPIPE_VLLM", "linear")
    other = plugin.cache_factor(read_scope("GEMMPIPE_VLLM"))
    with monkeypatch.context() as newer:
        newer.setattr("gemmpipe.__version__", "9.9")
        version = getter()
    assert len({empty, one, getter(), other, version}) == 5
    tables_digest.cache_clear()
    path.unlink()
    assert getter() == empty


def test_the_entry_point_is_register() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["vllm.general_plugins"].items()
    assert EntryPoint(name, value, "vllm.general_plugins").load() is plugin.register
    assert "vllm" in project["optional-dependencies"]
