"""The compile pool: failures of the compiler become facts of the build, and no compiler outlives its driver."""

import contextlib
import errno
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmpipe.core.data import Build, Device
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.executors import BuildResult
from gemmpipe.executors.compile_pool import CompilePool

KERNELS = """
import os, time
def dies(): ...
def __getattr__(name):
    if name == "hangs":
        time.sleep(3600)
    if name == "dies":
        os._exit(3)
    if name.startswith("errno_"):
        raise OSError(int(name[6:]), "system error", os.path.join(CACHE, "hash"))
    raise RuntimeError("ptxas\\nfailed")
del dies
"""


def _build(name: str) -> Build:
    return Build(kernel=f"odd_kernels:{name}", source_hash="", signature=(), constants=(), aligned=(), options=())


@pytest.fixture
def pool(tmp_path: Path, h200: Device) -> Iterator[CompilePool]:
    (tmp_path / "odd_kernels.py").write_text(f"CACHE = {str(tmp_path / 'cache')!r}{KERNELS}")
    pool = CompilePool(h200, 2, 3.0, (str(tmp_path),))
    yield pool
    pool.close(kill=True)


def _all(pool: CompilePool, count: int) -> dict[str, str]:
    found: list[BuildResult] = []
    deadline = time.monotonic() + 300
    while len(found) < count and time.monotonic() < deadline:
        pool.ready_pipe.poll(1)
        found += pool.done()
    return {built.build.kernel.split(":")[1]: built.facts.error for built in found}


def test_crash_hang_and_error_of_the_compiler(pool: CompilePool) -> None:
    for name in ("dies", "hangs", "raises"):
        pool.submit(_build(name))
    errors = _all(pool, 3)
    assert errors.pop("raises").endswith("ptxas failed")
    assert errors == {
        "dies": "the compiler died: exit code 3",
        "hangs": "compiling took longer than executor.compile_timeout_s=3",
    }
    assert pool.pending == 0
    pool.check()


def test_unsent_builds_can_be_dropped(pool: CompilePool) -> None:
    """E.g. those of searches ended by a budget, which would delay the builds of the finals."""
    for i in range(20):
        pool.submit(_build(f"raises_{i}"))
    pool.cancel_pending()
    sent = pool.pending
    assert 0 < sent < 20
    assert len(_all(pool, sent)) == sent
    assert pool.pending == 0
    pool.submit(_build("raises_again"))
    assert [*_all(pool, 1)] == ["raises_again"]


def test_every_build_of_a_long_queue_is_done(pool: CompilePool) -> None:
    for i in range(20):
        pool.submit(_build(f"raises_{i}"))
    assert len(_all(pool, 20)) == 20


@pytest.mark.parametrize(
    ("number", "file_in_place", "why"),
    [(errno.ENOTDIR, True, "Not a directory"), (errno.ENOSPC, False, "system error"), (errno.ENOENT, False, "")],
)
def test_an_unwritable_cache_is_an_environment_error(
    pool: CompilePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, file_in_place: bool, why: str
) -> None:
    """In the last case the folder was deleted; the next build makes it again."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    if file_in_place:
        (tmp_path / "cache").touch()
    pool.submit(_build(f"errno_{number}"))
    assert "system error" in _all(pool, 1)[f"errno_{number}"]
    message = f"^cannot compile into Triton's cache {tmp_path}/cache: {why}; TRITON_CACHE_DIR names another"
    with pytest.raises(EnvironmentProblem, match=message) if why else contextlib.nullcontext():
        pool.check()


DRIVER = """
import sys, time
from gemmpipe.core.data import Build, Device
from gemmpipe.executors.compile_pool import CompilePool
if __name__ == "__main__":
    device = Device(kind="cuda", index=0, name="", gfx="sm_90", cu_num=1, shared_bytes=1, cache_bytes=1, warp_size=32)
    pool = CompilePool(device, 1, 3600.0, (sys.argv[1],))
    build = Build(kernel="odd_kernels:hangs", source_hash="", signature=(), constants=(), aligned=(), options=())
    pool.submit(build)
    time.sleep(3600)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_hanging_compiler_does_not_outlive_a_killed_driver(tmp_path: Path) -> None:
    (tmp_path / "odd_kernels.py").write_text(KERNELS.replace("time.sleep", "open('hung', 'w'); time.sleep"))
    (tmp_path / "driver.py").write_text(DRIVER)
    mark = f"compiler-{uuid.uuid4()}"
    command = [sys.executable, "driver.py", str(tmp_path)]
    driver = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "COMPILER_MARK": mark}, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "hung").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "hung").exists()
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 120
    while _processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _processes_with(mark) == []


def _processes_with(mark: str) -> list[int]:
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found
