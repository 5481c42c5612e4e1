"""Ray workers are accepted by a driver only with equal code and devices."""

from dataclasses import replace
from pathlib import Path

import pytest

from gemmpipe.core.data import Device
from gemmpipe.executors.ray_worker import NodeInfo, code_hashes, mismatch


@pytest.fixture
def first(h200: Device, tmp_path: Path) -> NodeInfo:
    (tmp_path / "mine.py").write_text("A = 1\n")
    return NodeInfo(
        device=h200,
        facts={"name": "H200", "torch": "2.11.0"},
        node="a1",
        address="10.0.0.1",
        package="/opt/gemmpipe",
        code=code_hashes((str(tmp_path),)),
    )


def test_a_worker_with_the_same_code_and_device_is_accepted(first: NodeInfo) -> None:
    assert mismatch(replace(first, node="b2", address="10.0.0.2", package="/elsewhere"), first, first.code) is None


@pytest.mark.parametrize(
    ("facts", "difference"),
    [
        ({"name": "H100", "torch": "2.11.0"}, "name H100 instead of H200"),
        ({"name": "H200", "torch": "2.12.0"}, "torch 2.12.0 instead of 2.11.0"),
        ({"name": "H200"}, "torch None instead of 2.11.0"),
    ],
)
def test_a_worker_with_incomparable_times_is_refused(first: NodeInfo, facts: dict[str, str], difference: str) -> None:
    why = mismatch(replace(first, address="10.0.0.2", facts=facts), first, first.code)
    assert why is not None
    assert why.startswith("10.0.0.2 differs from 10.0.0.1: ")
    assert difference in why


def test_a_worker_with_other_code_is_refused(first: NodeInfo, tmp_path: Path) -> None:
    code_hashes.cache_clear()
    (tmp_path / "mine.py").write_text("A = 2\n")
    other = replace(first, address="10.0.0.2", code=code_hashes((str(tmp_path),)))
    assert f"10.0.0.2 has other code in {tmp_path}" in str(mismatch(other, first, first.code))
    other = replace(other, code={"gemmpipe": "0", str(tmp_path): "0"})
    assert "10.0.0.2 has other code in /opt/gemmpipe" in str(mismatch(other, first, first.code))


def test_a_worker_without_the_users_folder_is_refused(first: NodeInfo, tmp_path: Path) -> None:
    missing = str(tmp_path / "absent")
    other = replace(first, address="10.0.0.2", code=code_hashes((str(tmp_path), missing)))
    assert f"10.0.0.2 has no {missing}" in str(mismatch(other, first, {**first.code, missing: "1"}))


def test_kernels_behind_a_link_are_code_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, kernels = tmp_path / "package", tmp_path / "kernels" / "own"
    package.mkdir()
    kernels.mkdir(parents=True)
    (package / "kernels").symlink_to(kernels.parent)
    monkeypatch.setattr("gemmpipe.executors.ray_worker.PACKAGE", package)
    hashes = set()
    for text in ("A = 1\n", "A = 2\n"):
        (kernels / "kernel.py").write_text(text)
        code_hashes.cache_clear()
        hashes.add(code_hashes(())["gemmpipe"])
    code_hashes.cache_clear()
    assert len(hashes) == 2
