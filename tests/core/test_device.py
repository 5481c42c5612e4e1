"""Finding devices, and architectures to compile for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gemmpipe.core.device import DeviceChoice, _cpu_cache_bytes, arch_device, compute_units, cpu_device, versions
from gemmpipe.core.errors import EnvironmentProblem, UserError


def test_cpu_is_one_device() -> None:
    (device,) = DeviceChoice(kind="cpu", index=None, shared=False).find()
    assert device.gfx.startswith("cpu_")
    assert device.cu_num >= 1
    assert device.torch_name == "cpu"
    assert device.cache_bytes >= 2**18
    assert device == cpu_device()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_an_absent_gpu_is_an_environment_error() -> None:
    assert DeviceChoice(kind="auto", index=None, shared=False).find()[0].kind == "cpu"
    with pytest.raises(EnvironmentProblem, match=r"device\.kind=cuda: torch sees no GPU"):
        DeviceChoice(kind="cuda", index=None, shared=False).find()
    with pytest.raises(EnvironmentProblem, match=r"device\.index=3: torch sees no GPU; use device=cpu without"):
        DeviceChoice(kind="auto", index=3, shared=False).find()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["device=cpu", "device.index=3"], "device.index: 3 given, expected none with device.kind=cpu"),
        (["device=cpu", "device.index=[0,1]"], "device.index: [0,1] given, expected none with device.kind=cpu"),
        (["device.index=[]"], "device.index: [] given, expected GPUs such as [0,1], each once"),
        (["device.index=[0,0]"], "device.index: [0,0] given, expected GPUs such as [0,1], each once"),
    ],
)
def test_an_invalid_index_is_a_usage_error(refusal: Callable[..., str], args: list[str], message: str) -> None:
    assert refusal("capture", *args).startswith(message)


def test_unknown_names_are_usage_errors() -> None:
    with pytest.raises(UserError, match=r"did you mean 'cuda'"):
        DeviceChoice(kind="cudda", index=None, shared=False).find()
    with pytest.raises(UserError, match=r"did you mean 'gfx942'"):
        arch_device("gfx941")


def test_limits_of_architectures() -> None:
    assert (arch_device("sm_90").shared_bytes, arch_device("sm_90").cu_num) == (232448, 132)
    assert (arch_device("gfx942").vendor, arch_device("gfx942").warp_size) == ("amd", 64)
    assert arch_device("gfx950").shared_bytes == 160 * 1024
    radeon = arch_device("gfx1201")
    assert (radeon.vendor, radeon.cu_num, radeon.shared_bytes, radeon.warp_size) == ("amd", 64, 64 * 1024, 32)


def test_compute_units_are_counted_as_in_tables() -> None:
    assert [compute_units("gfx1201", reported) for reported in (32, 64, 28, 56)] == [64, 64, 56, 56]
    assert (compute_units("gfx942", 80), compute_units("sm_90", 66), compute_units("gfx1100", 48)) == (80, 66, 48)


def test_cache_size_is_read_or_a_default(tmp_path: Path) -> None:
    assert _cpu_cache_bytes(tmp_path) == 32 * 2**20
    for level, size in ((1, "48K"), (3, "36608K")):
        (tmp_path / f"index{level}").mkdir()
        (tmp_path / f"index{level}" / "size").write_text(f"{size}\n")
    assert _cpu_cache_bytes(tmp_path) == 36608 * 1024


def test_versions() -> None:
    assert {"gemmpipe", "python", "torch"} <= versions().keys()
