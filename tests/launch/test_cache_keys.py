"""The keys of Triton's disk cache: one per kernel and options, whatever a process compiled before."""

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from gemmpipe.core.device import arch_device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch.build import hash_callees_first

pytest.importorskip("triton")

SCRIPT = """
import importlib, pkgutil, sys
from triton.runtime.jit import JITCallable, JITFunction
import gemmpipe.kernels
from gemmpipe.launch.build import hash_callees_first
begun, nested = [], []
hashed = JITCallable.cache_key.fget
def cache_key(self):
    if self.hash is not None:
        return hashed(self)
    nested.extend([(begun[-1], self._fn_name)] if begun else [])
    begun.append(self._fn_name)
    found = hashed(self)
    begun.pop()
    return found
JITCallable.cache_key = property(cache_key)
found = pkgutil.walk_packages(gemmpipe.kernels.__path__, "gemmpipe.kernels.")
modules = [importlib.import_module(m.name) for m in found]
kernels = [each for m in modules for each in vars(m).values() if isinstance(each, JITFunction)]
if sys.argv[1] == "used before":
    for kernel in kernels:
        hash(kernel)
    nested.clear()
for kernel in reversed(kernels) if sys.argv[1] == "reversed" else kernels:
    hash_callees_first(kernel)
    print(kernel._fn_name, kernel.cache_key)
print("nested", nested)
"""


def _keys(order: str) -> dict[str, str]:
    command = [sys.executable, "-c", SCRIPT, order]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return dict(line.split(" ", 1) for line in lines)


def test_a_kernels_key_does_not_depend_on_those_hashed_before() -> None:
    """With Triton 3.6 it did for six of 112 functions, among them the kernels of block-scaled products (2026-11-29)."""
    first = _keys("in order")
    assert len(first) > 100
    assert first == _keys("reversed") == _keys("used before")
    assert first["nested"] == "[]", "Triton 3.6 needs each function hashed before those that call it"


CALLING_EACH_OTHER = """
import triton

@triton.jit
def even(n):
    return odd(n - 1)

@triton.jit
def odd(n):
    return even(n - 1)
"""


def test_functions_that_call_each_other_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling them is refused by Triton, with its own message."""
    (tmp_path / "calling_each_other.py").write_text(CALLING_EACH_OTHER)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("calling_each_other")
    hash_callees_first(module.even)
    assert module.even.hash
    assert module.odd.hash


HASHED_ANYWAY = """
import importlib, pkgutil
from triton.runtime.jit import JITCallable, JITFunction
import gemmpipe.kernels
from gemmpipe.launch.source_hash import source_hash
for m in pkgutil.walk_packages(gemmpipe.kernels.__path__, "gemmpipe.kernels."):
    for each in vars(importlib.import_module(m.name)).values():
        if isinstance(each, JITFunction):
            source_hash(each)
            assert each.hash is None, each._fn_name
"""


def test_the_hash_of_a_kernels_source_does_not_have_triton_hash_it() -> None:
    """The worker needs it for each build, the compile processes do not: their keys would be others with Triton 3.6."""
    subprocess.run([sys.executable, "-c", HASHED_ANYWAY], check=True)


TILE = {"BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "NUM_KSPLIT": 1, "kernel_type": "warp_specialised"}
TILES = (
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "num_stages": 4, "ONE_WARPGROUP": True},
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 32, "num_stages": 4, "ONE_WARPGROUP": True, "OWN_PACE": True},
    {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 64, "num_stages": 4, "OWN_PACE": True},
)
"""One of each kernel of block-scaled products by warpgroups."""
COMPILE = """
import pickle, sys
from gemmpipe.core.device import arch_device
from gemmpipe.launch.build import compile_kernel, find_kernel, record_cache_hits
from gemmpipe.launch.source_hash import source_hash
builds = pickle.load(open(sys.argv[1], "rb"))
if sys.argv[2] == "worker":
    for build in builds:
        assert source_hash(find_kernel(build.kernel)) == build.source_hash
with record_cache_hits() as hits:
    for build in builds if sys.argv[2] == "worker" else reversed(builds):
        compile_kernel(build, arch_device("sm_90"))
print(hits)
"""


def test_a_worker_finds_what_a_compile_process_compiled(tmp_path: Path) -> None:
    """With Triton 3.6 it compiled many of these kernels again, most of the time of a cold run (H200, 2026-11-29)."""
    family, device = load_family("a8w8_blockscale"), arch_device("sm_90")
    problem = make_problem(
        family, {"M": 64, "N": 256, "K": 1024}, KernelDefaults(dtype=None, out_dtype=None, bias=None), "sm_90", "test"
    )
    spec = family.spec(problem)
    kernel = next(each for each in family.implementations if each.label == "gluon")
    knobs = [kernel.normalise(spec, {**TILE, **tile}, device) for tile in TILES]
    builds = [build for each in knobs for build in kernel.builds(spec, each, device)[:1]]
    assert len({build.kernel for build in builds}) == 3
    (tmp_path / "builds").write_bytes(pickle.dumps(builds))
    command = [sys.executable, "-c", COMPILE, str(tmp_path / "builds")]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    outputs = [
        subprocess.run([*command, role], check=True, capture_output=True, text=True, env=environment).stdout.split()
        for role in ("compile process", "worker")
    ]
    assert outputs == [["[False,", "False,", "False]"], ["[True,", "True,", "True]"]]
