"""Separate tuned tables for each test, and no dispatches or kernels of other tests."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from gemmpipe.core.data import Scalar
from gemmpipe.core.device import cpu_device
from gemmpipe.core.paths import tables_variable
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.plugins import engine_dispatch, engine_experts, tuned_products
from gemmpipe.runtime import reload
from gemmpipe.runtime.selection_log import LOG
from gemmpipe.tables.store import render

WriteRows = Callable[..., Path]


def forget() -> None:
    """Drop all dispatches, tables and kernels of this process."""
    LOG.clear()
    reload()
    engine_dispatch.clear_dispatches()
    engine_dispatch._KERNELS.clear()
    engine_experts.clear_experts()
    tuned_products.tables_digest.cache_clear()


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the test's own tables."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("gemmpipe.runtime.tables.shipped_tables", lambda: tmp_path / "shipped")
    for name in (*tuned_products.FAMILIES, "VLLM"):
        monkeypatch.delenv(tables_variable(name), raising=False)
    for name in ("GEMMPIPE_VLLM", "GEMMPIPE_SGLANG", "GEMMPIPE_LOG_SELECTION"):
        monkeypatch.delenv(name, raising=False)
    forget()
    yield
    forget()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteRows:
    """Write rows of a family for this machine's CPU: one per key, all with one candidate."""

    def write(
        family: str,
        libtype: str,
        knobs: Mapping[str, Scalar],
        *keys: Mapping[str, Scalar],
        dtype: str | None = None,
        **times: Scalar,
    ) -> Path:
        found, device = load_family(family), cpu_device()
        defaults = KernelDefaults(dtype=dtype, out_dtype=None, bias=None)
        made: list[dict[str, Scalar]] = []
        for key in keys:
            problem = make_problem(found, dict(key), defaults, "sm_90", "test")
            place: dict[str, Scalar] = {"gfx": device.gfx, "cu_num": device.cu_num}
            made.append(
                {
                    **place,
                    **dict(problem.key),
                    "libtype": libtype,
                    "us": 1.0,
                    "config": json.dumps(dict(knobs)),
                    **times,
                }
            )
        path = tmp_path / f"{family}.csv"
        path.write_text(render(made, found, ()))
        monkeypatch.setenv(tables_variable(family), str(path))
        forget()
        return path

    return write


@pytest.fixture
def counted() -> Callable[..., Callable[..., torch.Tensor]]:
    """A stand-in for an engine's kernel: torch's own product, which counts its calls in `.calls`."""

    def make(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*operands: torch.Tensor) -> torch.Tensor:
            call.calls += 1  # type: ignore[attr-defined]
            return compute(*operands)

        call.calls = 0  # type: ignore[attr-defined]
        return call

    return make
