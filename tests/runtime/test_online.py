"""Online tuning: a miss, a separate process, a row, and the same program uses it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from gemmpipe import online as process
from gemmpipe.core.data import Problem
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.family import load_family
from gemmpipe.runtime import gemm_a16w16, online
from gemmpipe.runtime.dispatch import EAGER, dispatch_of
from gemmpipe.runtime.selection_log import LOG
from gemmpipe.tables.store import read

PROGRAM = """
import time, torch
from gemmpipe.runtime import gemm_a16w16
from gemmpipe.runtime.dispatches import EAGER

x, w = torch.ones(3, 96).bfloat16(), torch.ones(64, 96).bfloat16()
first = gemm_a16w16(x, w)
(call,) = EAGER["a16w16"].calls.values()
begin = time.monotonic()
while EAGER["a16w16"].calls.get(next(iter(EAGER["a16w16"].calls), None)) in (None, call):
    assert torch.equal(gemm_a16w16(x, w), first)
    assert time.monotonic() - begin < 300, "no row came"
    time.sleep(0.05)
gemm_a16w16(torch.ones(70, 96).bfloat16(), w)
"""
MM, CONVERT = {"method": "mm"}, {"method": "float32_convert"}


@pytest.mark.slow
def test_a_miss_is_tuned_by_another_process_and_the_same_program_has_its_row(tmp_path: Path) -> None:
    data = tmp_path / "my data, of=mine"  # no part of a path is Hydra syntax
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XDG_DATA_HOME": str(data),
        "GEMMPIPE_ONLINE_TUNING": "1",
        "GEMMPIPE_LOG_SELECTION": "1",
        "TMPDIR": str(tmp_path),  # device locks of its own
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    steps = [line.rsplit(": ", 3)[1] for line in done.stderr.splitlines() if "M=3 " in line and "torch method" in line]
    assert steps == ["fallback", "exact"], done.stderr
    (folder,) = (data / "gemmpipe" / "online").iterdir()
    assert folder.name == f"{cpu_device().gfx}-{cpu_device().cu_num}"
    # The program's last misses are tuned after its end, by the tuner that still runs.
    table = data / "gemmpipe" / "tuned" / "bf16_tuned_gemm.csv"
    deadline = time.monotonic() + 300
    while len(rows := read(table, load_family("a16w16"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert {(row["M"], row["policy"]) for row in rows} == {
        (3, "host interleaved shared_gpu"),
        (80, "host interleaved shared_gpu"),  # the padded M of 70
    }
    assert list(folder.glob("outputs/runs/online/*/trials.jsonl"))
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (folder, *folder.iterdir())}
    assert modes.pop("outputs")
    assert modes.pop(folder.name) == "0o700"
    assert modes == dict.fromkeys(
        ("missed.csv", ".missed.csv.lock", "tuner.lock", "tuner.log", "missed_a16w16.csv"), "0o600"
    )
    # The program's last misses are tuned after its end, by the tuner that still runs.
    table = data / "gemmpipe" / "tuned" / "bf16_tuned_gemm.csv"
    deadline = time.monotonic() + 100
    while len(rows := read(table, load_family("a16w16"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert {(row["M"], row["policy"]) for row in rows} == {
        (3, "host interleaved shared_gpu"),
        (80, "host interleaved shared_gpu"),  # the padded M of 70
    }
    assert list(folder.glob("outputs/runs/online/*/trials.jsonl"))
    assert {
        path.name: oct(path.stat().st_mode & 0o777)
        for path in (folder, *folder.iterdir())
        if path != folder / "outputs"
    } == {
        folder.name: "0o700",
        **dict.fromkeys(("missed.csv", ".missed.csv.lock", "tuner.lock", "tuner.log", "missed_a16w16.csv"), "0o600"),
    }
    while process.is_running(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not process.is_running(folder), "it ends when nothing new comes"


def test_changed_tables_serve_missed_keys_and_leave_the_rest(row, table, x, w) -> None:
    path = table(row(4, "torch", MM))
    gemm_a16w16(x(4), w)
    missed = gemm_a16w16(x(5), w)
    dispatch = EAGER["a16w16"]
    (tuned, _) = dispatch.calls
    kept = dispatch.calls[tuned]
    assert not dispatch.tables_changed()
    path.write_text(path.read_text() + path.read_text().splitlines()[1].replace(",4,64,", ",5,64,", 1) + "\n")
    assert dispatch.tables_changed()
    assert dispatch.reload_tables() == 1
    assert dispatch.calls == {tuned: kept}
    torch.testing.assert_close(gemm_a16w16(x(5), w), missed)
    assert (len(dispatch.calls), len(LOG.untuned)) == (2, 1)
    assert dispatch.reload_tables() == 0


def test_a_graph_uses_the_earlier_call_rather_than_load_a_kernel(row, table, x, w, monkeypatch) -> None:
    table()
    expected = gemm_a16w16(x(5), w)
    dispatch = EAGER["a16w16"]
    ((key, before),) = dispatch.calls.items()
    dispatch.reload_tables()
    monkeypatch.setattr("gemmpipe.runtime.cache.is_capturing", lambda device: True)
    assert torch.equal(gemm_a16w16(x(5), w), expected)
    assert key not in dispatch.calls
    monkeypatch.undo()
    gemm_a16w16(x(5), w)
    assert dispatch.calls[key] is not before


def test_threads_see_one_state_or_the_other(row, table, x, w) -> None:
    """Calls continue and are correct while tables are reloaded repeatedly."""
    path = table(row(4, "torch", MM))
    texts = [path.read_text(), path.read_text().splitlines()[0] + "\n"]
    operands = {m: x(m) for m in range(1, 9)}
    expected = {m: gemm_a16w16(x(m), w) for m in operands}
    stop = threading.Event()
    wrong: list[int] = []

    def call() -> None:
        while not stop.is_set():
            for m, values in operands.items():
                if not torch.allclose(gemm_a16w16(values, w).float(), expected[m].float(), atol=0.05):
                    wrong.append(m)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(20):
        path.write_text(texts[turn % 2])
        dispatch_of("a16w16").reload_tables()
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def alone_in_process(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """No state of other tests; records the overrides of tuners instead of starting them."""
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(online, "_TUNERS", {})
    monkeypatch.setattr(online.OnlineTuner, "run", lambda self: None)
    monkeypatch.setattr(process, "start_tuner", lambda folder, arguments: started.append(arguments))
    return started


@pytest.mark.parametrize(
    ("word", "gfx", "arguments", "message"),
    [
        ("1", "cpu", ("device.kind=cpu",), ""),
        ("1", "sm_90", ("device.index=0",), ""),
        ("cuda:3", "cpu", None, "a GPU's times are not valid for"),
        ("yes", "sm_90", None, "expected 1, 0 or a spare GPU such as cuda:3"),
        ("cuda:99", "sm_90", None, "this process has"),
        ("cuda:0", "sm_90", ("device.index=0",), "this program uses that GPU itself: its rows are provisional"),
    ],
)
def test_where_it_is_tuned(word: str, gfx: str, arguments: tuple[str, ...] | None, message: str, caplog) -> None:
    device = cpu_device() if gfx == "cpu" else arch_device(gfx)
    assert online._device_overrides(word, device) == arguments
    assert message in caplog.text


def test_a_spare_gpu_is_timed_alone_and_must_be_of_the_same_kind(monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(online, "gpu_device", lambda index: arch_device("sm_90" if index == 3 else "sm_100"))
    assert online._device_overrides("cuda:3", arch_device("sm_90")) == ("device.index=3", "device.shared=false")
    assert online._device_overrides("4", arch_device("sm_90")) is None
    assert "NVIDIA B200 is not a NVIDIA H200" in caplog.text


def test_off_by_default(row, table, x, w, monkeypatch, alone_in_process) -> None:
    monkeypatch.delenv("GEMMPIPE_ONLINE_TUNING", raising=False)
    table()
    gemm_a16w16(x(5), w)
    monkeypatch.setenv("GEMMPIPE_ONLINE_TUNING", "0")
    gemm_a16w16(x(6), w)
    assert online._TUNERS == {}


def test_an_untunable_key_is_not_queued_forever(row, table, x, w, monkeypatch, alone_in_process) -> None:
    class Ended:
        def poll(self) -> int:
            return 1

    monkeypatch.setenv("GEMMPIPE_ONLINE_TUNING", "1")
    monkeypatch.setattr(process, "start_tuner", lambda folder, arguments: alone_in_process.append(arguments) or Ended())
    table()
    gemm_a16w16(x(5), w)
    (found,) = online._TUNERS.values()
    for _ in range(9):
        found.check_once()
    assert len(alone_in_process) == 3
    rows = [line for line in (found.folder / process.MISSED).read_text().splitlines() if line.startswith("a16w16,5")]
    assert len(rows) == 1


@pytest.mark.compile
def test_eager_and_compiled_calls_both_see_new_rows(row, table, x, w, monkeypatch, alone_in_process) -> None:
    monkeypatch.setenv("GEMMPIPE_ONLINE_TUNING", "1")
    path = table(row(4, "torch", MM))
    compiled = torch.compile(gemm_a16w16, backend="eager")
    with torch.no_grad():
        gemm_a16w16(x(5), w), compiled(x(5), w)
        path.write_text(path.read_text() + path.read_text().splitlines()[1].replace(",4,64,", ",5,64,", 1) + "\n")
        (found,) = online._TUNERS.values()
        found.check_once()
        LOG.clear()
        gemm_a16w16(x(5), w)
        assert set(LOG.steps.values()) == {"exact"}
        LOG.clear()
        compiled(x(5), w)
        assert set(LOG.steps.values()) == {"exact"}


def test_the_process_tunes_the_most_called_first_and_each_family_in_its_own_run(tmp_path: Path, monkeypatch) -> None:
    ran: list[tuple[str, str]] = []
    monkeypatch.setattr(process, "_IDLE_S", 0.1)
    monkeypatch.setattr(process, "_tune", lambda folder, family, text, arguments: ran.append((family, text)))
    (tmp_path / process.MISSED).write_text(
        "family,M,N,K,count,layer\na16w16,1,2,3,4,\na16w16,2,2,3,40,q\na8w8,1,2,3,1,\n", encoding="utf-8"
    )
    process.tune_until_idle(tmp_path, ())
    assert ran == [
        ("a16w16", "family,M,N,K,layer,count\na16w16,2,2,3,q,40\na16w16,1,2,3,,4\n"),
        ("a8w8", "family,M,N,K,layer,count\na8w8,1,2,3,,1\n"),
    ]
    with process.exclusively(tmp_path) as mine:
        assert mine
        assert process.is_running(tmp_path)
    assert not process.is_running(tmp_path)


STRANGE = "../../../x"


@pytest.mark.slow
@pytest.mark.e2e
def test_a_row_of_the_queue_names_a_shipped_family_and_nothing_else(tmp_path: Path) -> None:
    """The real process: no cell becomes a file or an option, and valid rows are tuned."""
    folder, mark = tmp_path / "data" / "gemmpipe" / "online" / "cpu", tmp_path / "code-was-run"
    folder.mkdir(parents=True)
    evil = f"# @package hydra.callbacks\nx:\n  _target_: builtins.open\n  file: {mark}\n  mode: w\n"
    for place in (folder, tmp_path, *tmp_path.parents[:2]):
        if os.access(place, os.W_OK) and place.is_relative_to(tmp_path):
            (place / "x.yaml").write_text(evil)
    depth = "../" * 20
    rows = [
        f"{STRANGE},1,2,3,5",
        f"{depth}{str(folder)[1:]}/x,1,2,3,5",
        "a16w16 output=/tmp/x,1,2,3,5",
        "ａ16w16,1,2,3,5",
    ]
    rows += ["a16w16,8,32,64," + "9" * 5000, "a16w16,8,32,64,-1", "a16w16,8,32,64", 'a16w16,8,"32,64,1']
    rows += ["a16w16,eight,32,64,1", "a16w16,8,32,64,1"]
    (folder / process.MISSED).write_bytes(b"family,M,N,K,count\n" + "\n".join(rows).encode() + b"\na\xff,1,2,3,1\n")
    before = set(tmp_path.rglob("*"))
    arguments = ["device.kind=cpu", "search.budget_s=1"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "TMPDIR": str(tmp_path),
    }
    started = subprocess.Popen(
        [sys.executable, "-m", "gemmpipe.online", str(folder), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    table = tmp_path / "data" / "gemmpipe" / "tuned" / "bf16_tuned_gemm.csv"
    deadline = time.monotonic() + 100
    while not table.is_file() and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(started.pid, signal.SIGTERM)
    message = started.communicate()[0]
    assert not mark.exists()
    assert [(row["M"], row["N"], row["K"]) for row in read(table, load_family("a16w16"))] == [(8, 32, 64)], message
    assert "Traceback" not in message
    for row in (STRANGE, "a16w16 output=/tmp/x", "ａ16w16"):
        assert message.count(f"column family: '{row}', expected one of a16w16, ") == 1
    assert message.count("column count: '-1', expected a whole number from 1") == 1
    assert message.count("4 cells, expected 5 cells as in the header") == message.count("no CSV, expected 5 cells") == 1
    assert f"column count: '{'9' * 60}...'" in message
    assert "column M: 'eight'" in message
    assert list(tmp_path.rglob("missed_*")) == [folder / "missed_a16w16.csv"]
    assert set(tmp_path.rglob("x*")) <= before, "no cell names a file"


def test_the_folder_of_a_queue_is_the_users_alone(row, table, x, w, monkeypatch, alone_in_process, caplog) -> None:
    """A folder open to all is made private before it is read; another user's is refused."""
    monkeypatch.setenv("GEMMPIPE_ONLINE_TUNING", "1")
    cpu = cpu_device()
    folder = online.user_data() / "online" / f"{cpu.gfx}-{cpu.cu_num}"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    (folder / process.MISSED).write_text("family,M,N,K,count\n")
    (folder / process.MISSED).chmod(0o666)
    table()
    gemm_a16w16(x(5), w)
    (found,) = online._TUNERS.values()
    found.check_once()
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (folder, *folder.iterdir())}
    assert modes.pop(folder.name) == "0o700"
    assert set(modes.values()) == {"0o600"}
    assert len(alone_in_process) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_the_queue_of_another_user_is_not_read(row, table, x, w, monkeypatch, alone_in_process, caplog) -> None:
    monkeypatch.setenv("GEMMPIPE_ONLINE_TUNING", "1")
    cpu = cpu_device()
    folder = online.user_data() / "online" / f"{cpu.gfx}-{cpu.cu_num}"
    folder.mkdir(parents=True)
    os.chown(folder, 12345, -1)
    table()
    gemm_a16w16(x(5), w)
    assert list(online._TUNERS.values()) == [None]
    assert f"{folder}: belongs to uid 12345, expected a folder of your own: nothing is tuned" in caplog.text


def test_a_family_of_ones_own_is_not_queued(monkeypatch, alone_in_process, caplog) -> None:
    monkeypatch.setenv("GEMMPIPE_ONLINE_TUNING", "1")
    untuned = LOG.count_miss("relu2", "relu2 M=1")
    online.missed(None, Problem(family="relu2", key=(("M", 1),)), cpu_device(), untuned)  # type: ignore[arg-type]
    assert online._TUNERS == {}
    assert "relu2 is your own family" in caplog.text
