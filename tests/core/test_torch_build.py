"""Facts of torch found without importing it are those that torch reports."""

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from gemmpipe.core import torch_build
from gemmpipe.core.torch_build import cpu_capability, may_have_gpu

pytestmark = pytest.mark.unit


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported torch; its cache folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch")
    torch_build.torch_build.cache_clear()


@pytest.mark.usefixtures("without_torch")
def test_versions_are_torchs_own() -> None:
    build = torch_build.torch_build()
    assert "torch" not in sys.modules
    assert (build.version, build.cuda, build.hip) == (str(torch.__version__), torch.version.cuda, torch.version.hip)


@pytest.mark.usefixtures("without_torch")
def test_the_capability_is_torchs_answer_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    name = cpu_capability()
    assert name in (torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_"), "neon")
    (kept,) = (tmp_path / "gemmpipe" / "cpu_capability").iterdir()
    monkeypatch.delitem(sys.modules, "torch")
    kept.write_text("kept\n")
    assert cpu_capability() == "kept"
    assert "torch" not in sys.modules
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # torch would use other kernels
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert cpu_capability() == name


@pytest.mark.skipif(sys.platform != "linux", reason="drivers of other systems have other names")
def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    build = torch_build.TorchBuild(version="2.11", cuda="13.0", hip=None)
    monkeypatch.setattr(torch_build, "torch_build", lambda: build)
    assert not may_have_gpu()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert may_have_gpu()


def test_what_torch_can_use_may_be_there() -> None:
    assert may_have_gpu() or not torch.cuda.is_available()
