"""Captured products of programs: keys, counts and layers, by any number of processes."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked_programs import Forking

from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.runtime import gemm_a16w16, reload
from gemmpipe.runtime.capture.recorder import Recorder
from gemmpipe.runtime.capture.watcher import Watcher
from gemmpipe.sources.table import CsvShapes

SCRIPT = """
import sys, torch
from torch import nn
assert sys.argv[1:] == ["four", "--words"], sys.argv
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
    def forward(self, x):
        return self.down(self.up(x).relu())
model = nn.Sequential(Block(), Block()).bfloat16()
x = torch.ones(2, 3, 32).bfloat16()
with torch.no_grad():
    model(x), model(x)
    x[0].T @ x[0]
    torch.bmm(x, x.mT)
    x.float() @ torch.ones(32, 8)
"""


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def _environment() -> dict[str, str]:
    return {**os.environ, "GEMMPIPE_CAPTURE": "seen.csv", "PYTHONPATH": str(Path(__file__).parents[2])}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gemmpipe.capture", *arguments]
    return subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False)


Capture = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def capture(forked_programs: Forking, tmp_path: Path) -> Capture:
    """As `run` in the test's folder, without the seconds of a start."""
    return lambda *arguments: forked_programs.run(tmp_path, _environment(), "gemmpipe.capture", arguments)


def test_a_program_as_it_is(tmp_path: Path, capture: Capture) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for start in (lambda *arguments: run(tmp_path, *arguments), capture):
        done = start("script.py", "four", "--words")
        assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "seen.csv")
    kernels = sorted({row["family"] for row in rows})
    sweep = " -m" if len(kernels) > 1 else ""
    command = f"gemmpipe{sweep} kernel={','.join(kernels)} shapes=csv shapes.path={tmp_path}/seen.csv"
    assert done.stderr.rstrip().endswith(f"captured products are in {tmp_path}/seen.csv; next: {command}")
    linear = {row["layer"]: row for row in rows if row["layer"]}
    assert set(linear) == {"0.up", "0.down", "1.up", "1.down"}
    up, down = linear["0.up"], linear["1.down"]
    assert [up[name] for name in ("family", "M", "N", "K", "bias", "dtype", "count", "layout")] == [
        *("a16w16", "6", "64", "32", "True", "bfloat16", "4", "mk nk")
    ]
    assert [down[name] for name in ("M", "N", "K", "bias", "count")] == ["6", "32", "64", "False", "4"]
    others = {row["family"] + row["dtype"]: row for row in rows if not row["layer"]}
    assert others["batched_bf16bfloat16"]["B"] == "2"
    assert others["otherfloat32"]["count"] == "2"
    assert others["a16w16bfloat16"]["layout"] == "km kn"
    problems = CsvShapes(path=str(tmp_path / "seen.csv"), rows_of=None).problems(
        load_family("a16w16"), KernelDefaults(dtype=None, out_dtype=None, bias=None), "sm_90"
    )
    assert [(p["M"], p["N"], p["K"], p.weight, p.layer) for p in problems] == [
        (6, 64, 32, 8.0, "0.up+1.up"),
        (6, 32, 64, 8.0, "0.down+1.down"),
        (32, 32, 3, 2.0, ""),
    ]


def test_the_programs_own_exception_is_raised_and_loses_nothing(tmp_path: Path, capture: Capture) -> None:
    (tmp_path / "script.py").write_text("import torch; torch.ones(2, 2) @ torch.ones(2, 2); raise SystemExit(7)")
    assert capture("script.py").returncode == 7
    assert len(read(tmp_path / "seen.csv")) == 1
    done = capture("absent.py")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no file 'absent.py'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "nosuch"), "gemmpipe: nosuch: cannot be started: No module named nosuch"),
        (("-m", "nosuch.part"), "gemmpipe: nosuch.part: cannot be started: Error while finding"),
        (("-m", "package"), "gemmpipe: package: cannot be started: No module named package.__main__"),
        (("cut.py",), "gemmpipe: cut.py:1: '(' was never closed"),
    ],
)
def test_a_program_that_cannot_be_started_is_one_line(
    tmp_path: Path, capture: Capture, arguments: tuple[str, ...], message: str
) -> None:
    """No message about the file, which is from an earlier run."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "cut.py").write_text("print(1")
    (tmp_path / "seen.csv").write_text("family,count\na16w16,1\n")
    done = capture(*arguments)
    assert (done.returncode, done.stderr.count("\n"), done.stderr[: len(message)]) == (2, 1, message)


@pytest.mark.parametrize("arguments", [("lost.py",), ("-m", "lost"), ("-m", "lost.part"), ("again.py",)])
def test_what_a_program_raises_once_it_runs_keeps_its_traceback(
    tmp_path: Path, capture: Capture, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "lost.py").write_text("import nowhere")
    (tmp_path / "again.py").write_text("import runpy; runpy.run_module('nowhere')")
    (tmp_path / "seen.csv").write_text("family,count\na16w16,1\n")
    done = capture(*arguments)
    assert (done.returncode, "Traceback" in done.stderr, "No module named" in done.stderr) == (1, True, True)
    assert "captured products are in" not in done.stderr
    assert "seen.csv is from an earlier run" in done.stderr


THREADS = """
import multiprocessing, threading, torch
torch.set_num_threads(1)
torch.ones(2, 3) @ torch.ones(3, 4)
def work(m):
    torch.ones(m, 8) @ torch.ones(8, 8)
class Own(threading.Thread):
    def run(self):
        work(7)
threads = [threading.Thread(target=work, args=(5,)), Own()]
children = [multiprocessing.get_context("fork").Process(target=work, args=(6,)) for _ in range(2)]
for each in threads + children:
    each.start()
    each.join()
assert threading.Thread(target=work, args=(9,)).run() is None
"""


def test_an_unwritable_file_is_not_reported_as_no_products(tmp_path: Path, forked_programs: Forking) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\ntorch.ones(4, 8).bfloat16() @ torch.ones(8, 16).bfloat16()\n")
    (tmp_path / "file").write_text("")
    given = {**os.environ, "GEMMPIPE_CAPTURE": str(tmp_path / "file" / "there.csv")}
    done = forked_programs.run(tmp_path, given, "gemmpipe.capture", [str(script)])
    assert done.returncode == 3, done.stderr
    assert "captured products are lost" in done.stderr
    assert "no product" not in done.stderr


def test_threads_and_forked_processes_count_and_none_twice(tmp_path: Path, capture: Capture) -> None:
    (tmp_path / "script.py").write_text(THREADS)
    done = capture("script.py")
    assert done.returncode == 0, done.stderr
    assert {row["M"]: row["count"] for row in read(tmp_path / "seen.csv")} == {
        "2": "1",
        "5": "1",
        "6": "2",
        "7": "1",
        "9": "1",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,wage\nann,3\n", "no file of captured products"),
        ("import torch\n", "no file of captured products"),
    ],
)
def test_another_file_is_left_as_it_is(tmp_path: Path, capture: Capture, text: str, message: str, caplog) -> None:
    path = tmp_path / "seen.csv"
    path.write_text(text)
    (tmp_path / "script.py").write_text("raise AssertionError('ran')")
    done = capture("script.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    mine = Recorder(path=path)
    mine.add("a16w16", {"M": 1, "N": 8, "K": 8}, "")
    for _ in range(2):
        mine.flush()
    assert len(caplog.records) == 1
    assert message in caplog.text
    assert path.read_text() == text
    path.write_text("family,M,count\na16w16,1,4\n")  # of a version with fewer columns
    mine.flush()
    assert [(row["M"], row["N"], row["count"]) for row in read(path)] == [("1", "", "4"), ("1", "8", "1")]


ODD = (
    "a16w16,4," + "9" * 5000,
    "a16w16,4,many",
    "a16w16,4,０1",
    "a16w16,4,0",
    "a16w16,4",
    'a16w16,"4,1',
    "a16w16,4,1\udcff",
)


def _with_odd_row(path: Path, row: str) -> None:
    path.write_bytes(f"family,M,count\n{row}\na16w16,7,2\n".encode(errors="surrogateescape"))


def _expect_odd_row_kept(path: Path, row: str) -> None:
    lines = path.read_text().splitlines()
    assert lines[-1] == row.replace("\udcff", "\\xff")
    found = [(each["family"], each["M"], each["count"]) for each in csv.DictReader(lines[:-1])]
    assert found == [("a16w16", "7", "2"), ("a16w16", "3", "3")]


@pytest.mark.parametrize("row", ODD, ids=lambda row: row[:20])
def test_a_bad_row_of_a_capture_is_reported_once_and_neither_counted_nor_lost(
    row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "seen.csv"
    _with_odd_row(path, row)
    mine = Recorder(path=path)
    for _ in range(3):
        mine.add("a16w16", {"M": 3, "N": 16, "K": 32}, "")
        mine.flush()
    assert caplog.text.count("the row is kept and not counted") == 1
    assert "seen.csv:2: " in caplog.text
    _expect_odd_row_kept(path, row)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row in (ODD[1], ODD[-1]) else pytest.mark.slow) for row in ODD],
    ids=lambda row: row[:20],
)
def test_a_program_reports_a_bad_row_of_a_capture_once(row: str, tmp_path: Path, forked_programs: Forking) -> None:
    """In a program that requests the capture only by the variable."""
    path = tmp_path / "seen.csv"
    _with_odd_row(path, row)
    script = """import torch
from gemmpipe.runtime import gemm_a16w16
from gemmpipe.runtime.capture.recorder import capture_file, recorder_for
for _ in range(3):
    gemm_a16w16(torch.ones(3, 32).bfloat16(), torch.ones(16, 32).bfloat16())
    recorder_for(capture_file("seen.csv")).flush()
print("the end")
"""
    environment = {**os.environ, "GEMMPIPE_CAPTURE": "seen.csv", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment |= {"XDG_DATA_HOME": str(tmp_path)}
    (tmp_path / "program.py").write_text(script)
    done = forked_programs.run(tmp_path, environment, "program", ())
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
    assert done.stderr.count("the row is kept and not counted") == 1, done.stderr
    assert "seen.csv:2: " in done.stderr
    _expect_odd_row_kept(path, row)


def test_captured_files_are_the_users_alone_unless_opened(tmp_path: Path) -> None:
    mine = Recorder(path=tmp_path / "seen.csv")
    for mode in (0o600, 0o640):
        mine.add("a16w16", {"M": 1, "N": 8, "K": 8}, "")
        mine.flush()
        assert [oct(path.stat().st_mode & 0o777) for path in (mine.path, tmp_path / ".seen.csv.lock")] == [
            oct(mode),
            "0o600",
        ]
        mine.path.chmod(0o640)


@pytest.mark.parametrize("name", ["two\nlines", "half \ud800", "a,b"])
def test_any_name_of_a_layer_is_one_row(name: str, tmp_path: Path) -> None:
    mine = Recorder(path=tmp_path / "seen.csv")
    for count in (1, 2):
        mine.add("a16w16", {"M": 1, "N": 8, "K": 8}, name)
        mine.flush()
        ((row),) = read(mine.path)
        assert (row["count"], row["layer"]) == (str(count), name.replace("\n", "?").replace("\ud800", "?"))


def test_a_capture_never_raises_into_the_program(tmp_path: Path, monkeypatch, caplog) -> None:
    """For any folder, variable or operator; a pipe without a reader does not block."""
    for name in ("pipe.csv", ".locked.csv.lock"):
        os.mkfifo(tmp_path / name)
    for name in ("pipe.csv", "locked.csv"):
        held = Recorder(path=tmp_path / name)
        held.add("a16w16", {"M": 1, "N": 8, "K": 8}, "")
        held.flush()
        assert f"{name}: captured products are not written" in caplog.text
    monkeypatch.setenv("GEMMPIPE_CAPTURE", "~nosuchuser/seen.csv")
    reload()
    gemm_a16w16(torch.ones(3, 32).bfloat16(), torch.ones(16, 32).bfloat16())
    assert "GEMMPIPE_CAPTURE=~nosuchuser/seen.csv: not a valid path" in caplog.text

    class Odd(torch.nn.Linear):
        def named_modules(self, *arguments: object, **named: object) -> object:
            raise KeyError("not like that")

    mine = Recorder(path=tmp_path / "seen.csv")
    with torch.no_grad(), Watcher(mine):
        Odd(8, 4)(torch.ones(2, 8))
        monkeypatch.setattr("gemmpipe.runtime.capture.watcher.product_of", lambda *arguments: 1 / 0)
        for _ in range(2):
            assert torch.equal(torch.ones(2, 8) @ torch.ones(8, 4), torch.full((2, 4), 8.0))
    assert sum(mine.counts.values()) == 1
    assert "a product is not captured: KeyError: 'not like that'" in caplog.text
    assert caplog.text.count("a product is not captured: ZeroDivisionError") == 1


SPAWNED = """
import multiprocessing, torch
def work(m):
    for _ in range(m):
        torch.ones(m, 8) @ torch.ones(8, 8)
def rank(i, m):
    work(m + i)
class Own(multiprocessing.get_context("spawn").Process):
    def run(self):
        work(3)
if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, args=(4,), nprocs=2)
    for each in (multiprocessing.get_context("forkserver").Process(target=work, args=(2,)), Own()):
        each.start()
        each.join()
        assert each.exitcode == 0
"""


@pytest.mark.slow
def test_spawned_processes_count_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SPAWNED)
    done = run(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    assert {row["M"]: row["count"] for row in read(tmp_path / "seen.csv")} == {"2": "2", "3": "3", "4": "4", "5": "5"}


RANK = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 4))
for _ in range(3):
    with torch.no_grad():
        model(torch.ones(5 + rank, 8))
dist.destroy_process_group()
assert sys.argv[1:] == ["word"]
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
@pytest.mark.parametrize("launcher", [("-m", "torch.distributed.run"), ("torchrun",)])
def test_ranks_of_torchrun_write_one_file(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text(RANK)
    done = run(tmp_path, *launcher, "--nproc-per-node", "2", "script.py", "word")
    assert done.returncode == 0, done.stderr
    found = [(row["M"], row["N"], row["layer"], row["count"]) for row in read(tmp_path / "seen.csv")]
    assert sorted(found) == [("5", "4", "module", "3"), ("6", "4", "module", "3")]


def test_a_command_is_its_script_and_nothing_else(capture: Capture) -> None:
    done = capture("ls")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "/ls' is not a Python script" in done.stderr


RANKS = """
import os, sys
from pathlib import Path
from gemmpipe.runtime.capture.recorder import Recorder
def work(rank):
    mine = Recorder(path=Path(sys.argv[1]))
    for m in range(20):
        mine.add("a16w16", {"M": m + 1, "N": 8, "K": 8}, f"rank{rank}")
        mine.add("a16w16", {"M": 1, "N": 9, "K": 8}, "")
        mine.flush()
ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if not ranks[-1]:
        work(rank)
        os._exit(0)
sys.exit(max(os.waitpid(rank, 0)[1] for rank in ranks))
"""


def test_processes_write_one_file_without_losing_a_row(tmp_path: Path, forked_programs: Forking) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    path = tmp_path / "seen.csv"
    done = forked_programs.run(tmp_path, os.environ, "ranks", [str(path)])
    assert done.returncode == 0, done.stderr
    rows = read(path)
    assert len(rows) == 41
    assert [row["count"] for row in rows if row["N"] == "9"] == ["40"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("gemmpipe.capture", "--help"), 0, "python -m gemmpipe.capture SCRIPT.py ARGS..."),
        (("gemmpipe.capture",), 2, "gemmpipe: expected a program: python -m gemmpipe.capture SCRIPT.py ARGS..."),
        (("gemmpipe.capture", "nix.py"), 2, "gemmpipe: no file 'nix.py'; python -m gemmpipe.capture SCRIPT.py"),
        (("gemmpipe.online",), 2, "gemmpipe: started by the runtime: set GEMMPIPE_ONLINE_TUNING=1"),
        (("gemmpipe.online", "nix"), 2, "gemmpipe: started by the runtime"),
    ],
)
def test_modules_that_are_run_have_a_usage(
    arguments: tuple[str, ...], code: int, message: str, tmp_path: Path, forked_programs: Forking
) -> None:
    module, *rest = arguments
    ended = forked_programs.run(tmp_path, os.environ, module, rest)
    assert (ended.returncode, (ended.stdout + ended.stderr).startswith(message)) == (code, True), ended.stderr
    assert list(tmp_path.iterdir()) == []
