"""Compiling an engine's JIT functions ahead of their calls, without a GPU and without memory."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from triton.runtime.jit import JITFunction

from gemmpipe.backends.engine_compile import CompileCalls, compile_only_for, empty_meta
from gemmpipe.core.data import Knobs
from gemmpipe.core.device import arch_device
from gemmpipe.core.spec import GemmSpec
from gemmpipe.family import load_family

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def doubled(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, mask=at < size), mask=at < size)


@triton.jit
def broken(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, tl.no_such_function(BLOCK))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "engine_like_kernels.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "engine_like_kernels", raising=False)  # its functions cache their builds
    importlib.invalidate_caches()
    return tmp_path / "cache"


class Calls:
    """An implementation with one launch of a JIT function per call."""

    def call_on_meta(self, spec: GemmSpec, knobs: Knobs) -> None:
        module = importlib.import_module("engine_like_kernels")
        x = empty_meta((spec.m,), "float32")
        if knobs["BLOCK"] == 0:
            module.broken[(1,)](x, BLOCK=16)
        module.doubled[(1,)](x, x, spec.m, BLOCK=knobs["BLOCK"])


def _spec(m: int) -> GemmSpec:
    family = load_family("a16w16")
    key = {"M": m, "N": 16, "K": 16, "dtype": "bfloat16", "outdtype": "bfloat16"}
    values = tuple((c.name, key.get(c.name, c.default)) for c in family.key_columns)
    return family.spec(family.problem(values))


def test_a_call_compiles_and_launches_nothing(cache: Path) -> None:
    run = JITFunction.run
    calls = [(_spec(64), {"BLOCK": block}) for block in (16, 32)]
    done = CompileCalls(implementation=Calls(), device=arch_device("sm_90"), calls=calls)()
    assert done == 2
    assert len(list(cache.glob("*/doubled.cubin"))) == 2
    assert JITFunction.run is run


def test_a_call_that_fails_leaves_the_others(cache: Path) -> None:
    calls = [(_spec(64), {"BLOCK": block}) for block in (0, 16)]
    assert CompileCalls(implementation=Calls(), device=arch_device("sm_90"), calls=calls)() == 1
    assert list(cache.glob("*/doubled.cubin"))


def test_tensors_without_memory_count_as_aligned(cache: Path) -> None:
    module = importlib.import_module("engine_like_kernels")
    with compile_only_for(arch_device("sm_90")):
        x = torch.empty(64, device="meta")
        kernel = module.doubled[(1,)](x, x, 64, BLOCK=16)
    assert "tt.divisibility = 16" in kernel.asm["ttir"]
