"""Separate tuned tables for each test, used only by this process."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from gemmpipe.core.data import Scalar
from gemmpipe.core.device import cpu_device
from gemmpipe.core.paths import shipped_tables
from gemmpipe.family import load_family
from gemmpipe.runtime import reload
from gemmpipe.runtime.selection_log import LOG
from gemmpipe.runtime.weight_cache import WEIGHT_CACHE
from gemmpipe.tables.store import render

N, K = 64, 96
MakeRow = Callable[..., dict[str, Scalar]]
WriteTable = Callable[..., Path]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the test's own table, and no state of other tests."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("gemmpipe.runtime.tables.shipped_tables", lambda: tmp_path / "shipped")
    monkeypatch.setattr("gemmpipe.runtime.capture.recorder._FLUSH_S", math.inf)  # written when a test asks for it
    for name in ("GEMMPIPE_CONFIG_A16W16", "GEMMPIPE_CONFIG_A8W8_BLOCKSCALE", "GEMMPIPE_LOG_SELECTION"):
        monkeypatch.delenv(name, raising=False)
    LOG.clear()
    WEIGHT_CACHE.entries.clear()
    reload()
    yield
    reload()


@pytest.fixture
def shipped(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's own tables too."""
    monkeypatch.setattr("gemmpipe.runtime.tables.shipped_tables", shipped_tables)
    reload()


@pytest.fixture
def row() -> MakeRow:
    """A row of a16w16's table for this machine's CPU: N 64, K 96, bf16."""

    def make(m: int, libtype: str, knobs: Mapping[str, Scalar] | None, **others: Scalar) -> dict[str, Scalar]:
        device = cpu_device()
        made: dict[str, Scalar] = {"gfx": device.gfx, "cu_num": device.cu_num, "M": m, "N": N, "K": K, "bias": False}
        made |= {"dtype": "bfloat16", "outdtype": "bfloat16", "scaleAB": False, "bpreshuffle": False}
        made |= {"libtype": libtype, "us": 1.0, "config": None if knobs is None else json.dumps(dict(knobs))}
        return {**made, **others}

    return make


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteTable:
    """Write rows to a file; without a path, to the one that the environment names."""

    def write(*rows: dict[str, Scalar], path: Path | None = None) -> Path:
        family = load_family("a16w16")
        file = path or tmp_path / "table.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(render(rows, family, ()))
        if path is None:
            monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", str(file))
        reload()
        return file

    return write


@pytest.fixture
def x() -> Callable[..., torch.Tensor]:
    """Random bf16 activations [..., K]."""
    return lambda *rows: torch.randn(*rows, K, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.fixture
def w() -> torch.Tensor:
    """A random bf16 weight [N, K]."""
    return (torch.randn(N, K, generator=torch.Generator().manual_seed(5)) * K**-0.5).bfloat16()
