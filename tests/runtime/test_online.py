"""Tuning beside the program: a miss, a process of its own, a row, and the same program answered by it."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from gemmpipe import online as process
from gemmpipe.device import arch_device, cpu_device
from gemmpipe.family import load_family
from gemmpipe.runtime import gemm_a16w16, online
from gemmpipe.runtime.dispatches import EAGER, dispatch_of
from gemmpipe.runtime.selection import LOG
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
    assert time.monotonic() - begin < 100, "no row came"
    time.sleep(0.05)
gemm_a16w16(torch.ones(70, 96).bfloat16(), w)
"""
MM, CONVERT = {"method": "mm"}, {"method": "float32_convert"}


@pytest.mark.slow
def test_a_miss_is_tuned_by_another_process_and_the_same_program_has_its_row(tmp_path: Path) -> None:
    data = tmp_path / "my data, of=mine"  # nothing in a path is a word of Hydra's
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
    # What the program missed at last is tuned after its end, by the process that is still there.
    table = data / "gemmpipe" / "tuned" / "bf16_tuned_gemm.csv"
    deadline = time.monotonic() + 100
    while len(rows := read(table, load_family("a16w16"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert {(row["M"], row["policy"]) for row in rows} == {
        (3, "host interleaved shared_gpu"),
        (80, "host interleaved shared_gpu"),  # the M that look-up pads 70 to
    }
    assert list(folder.glob("outputs/runs/online/*/trials.jsonl"))
    while process.running(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not process.running(folder), "it ends when nothing new comes"


def test_tables_that_change_answer_what_was_missed_and_leave_the_rest(row, table, x, w) -> None:
    path = table(row(4, "torch", MM))
    gemm_a16w16(x(4), w)
    missed = gemm_a16w16(x(5), w)
    dispatch = EAGER["a16w16"]
    (tuned, _) = dispatch.calls
    kept = dispatch.calls[tuned]
    assert not dispatch.changed()
    path.write_text(path.read_text() + path.read_text().splitlines()[1].replace(",4,64,", ",5,64,", 1) + "\n")
    assert dispatch.changed()
    assert dispatch.renew() == 1
    assert dispatch.calls == {tuned: kept}
    torch.testing.assert_close(gemm_a16w16(x(5), w), missed)
    assert (len(dispatch.calls), len(LOG.untuned)) == (2, 1)
    assert dispatch.renew() == 0


def test_a_graph_takes_what_answered_before_rather_than_load_something_new(row, table, x, w, monkeypatch) -> None:
    table()
    expected = gemm_a16w16(x(5), w)
    dispatch = EAGER["a16w16"]
    ((key, before),) = dispatch.calls.items()
    dispatch.renew()
    monkeypatch.setattr("gemmpipe.runtime.answering.capturing", lambda device: True)
    assert torch.equal(gemm_a16w16(x(5), w), expected)
    assert key not in dispatch.calls
    monkeypatch.undo()
    gemm_a16w16(x(5), w)
    assert dispatch.calls[key] is not before


def test_threads_see_one_state_or_the_other(row, table, x, w) -> None:
    """Calls go on and are right while tables are read again and again."""
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
        dispatch_of("a16w16").renew()
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def alone_in_process(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Nothing remembered of other tests; the words with which a process would have been started."""
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(online, "_ALL", {})
    monkeypatch.setattr(online.Online, "watch", lambda self: None)
    monkeypatch.setattr(process, "start", lambda folder, words: started.append(words))
    return started


@pytest.mark.parametrize(
    ("word", "gfx", "words", "said"),
    [
        ("1", "cpu", ("device.kind=cpu",), ""),
        ("1", "sm_90", ("device.index=0",), ""),
        ("cuda:3", "cpu", None, "a GPU's times say nothing about"),
        ("yes", "sm_90", None, "expected 1, 0 or a spare GPU such as cuda:3"),
        ("cuda:99", "sm_90", None, "this process sees"),
        ("cuda:0", "sm_90", ("device.index=0",), "this program computes there itself: its rows are provisional"),
    ],
)
def test_where_it_is_tuned(word: str, gfx: str, words: tuple[str, ...] | None, said: str, caplog) -> None:
    device = cpu_device() if gfx == "cpu" else arch_device(gfx)
    assert online._where(word, device) == words
    assert said in caplog.text


def test_a_spare_gpu_is_timed_alone_and_must_be_of_the_same_kind(monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(online, "gpu_device", lambda index: arch_device("sm_90" if index == 3 else "sm_100"))
    assert online._where("cuda:3", arch_device("sm_90")) == ("device.index=3", "device.shared=false")
    assert online._where("4", arch_device("sm_90")) is None
    assert "NVIDIA B200 is no NVIDIA H200" in caplog.text


def test_off_unless_asked_for(row, table, x, w, monkeypatch, alone_in_process) -> None:
    monkeypatch.delenv("GEMMPIPE_ONLINE_TUNING", raising=False)
    table()
    gemm_a16w16(x(5), w)
    monkeypatch.setenv("GEMMPIPE_ONLINE_TUNING", "0")
    gemm_a16w16(x(6), w)
    assert online._ALL == {}


def test_what_nobody_can_tune_is_not_asked_for_for_ever(row, table, x, w, monkeypatch, alone_in_process) -> None:
    class Ended:
        def poll(self) -> int:
            return 1

    monkeypatch.setenv("GEMMPIPE_ONLINE_TUNING", "1")
    monkeypatch.setattr(process, "start", lambda folder, words: alone_in_process.append(words) or Ended())
    table()
    gemm_a16w16(x(5), w)
    (found,) = online._ALL.values()
    for _ in range(9):
        found.look()
    assert len(alone_in_process) == 3
    rows = [line for line in (found.folder / process.MISSED).read_text().splitlines() if line.startswith("a16w16,5")]
    assert len(rows) == 1


def test_eager_and_compiled_calls_both_see_new_rows(row, table, x, w, monkeypatch, alone_in_process) -> None:
    monkeypatch.setenv("GEMMPIPE_ONLINE_TUNING", "1")
    path = table(row(4, "torch", MM))
    compiled = torch.compile(gemm_a16w16, backend="eager")
    with torch.no_grad():
        gemm_a16w16(x(5), w), compiled(x(5), w)
        path.write_text(path.read_text() + path.read_text().splitlines()[1].replace(",4,64,", ",5,64,", 1) + "\n")
        (found,) = online._ALL.values()
        found.look()
        LOG.clear()
        gemm_a16w16(x(5), w)
        assert set(LOG.answers.values()) == {"exact"}
        LOG.clear()
        compiled(x(5), w)
        assert set(LOG.answers.values()) == {"exact"}


def test_the_process_tunes_the_most_called_first_and_each_family_in_its_own_run(tmp_path: Path, monkeypatch) -> None:
    ran: list[tuple[str, str]] = []
    monkeypatch.setattr(process, "_IDLE_S", 0.1)
    monkeypatch.setattr(process, "_tune", lambda folder, family, text, words: ran.append((family, text)))
    (tmp_path / process.MISSED).write_text(
        "family,M,N,K,count,layer\na16w16,1,2,3,4,\na16w16,2,2,3,40,q\na8w8,1,2,3,1,\n", encoding="utf-8"
    )
    process.work(tmp_path, ())
    assert ran == [
        ("a16w16", "family,M,N,K,layer,count\na16w16,2,2,3,q,40\na16w16,1,2,3,,4\n"),
        ("a8w8", "family,M,N,K,layer,count\na8w8,1,2,3,,1\n"),
    ]
    with process.alone(tmp_path) as mine:
        assert mine
        assert process.running(tmp_path)
    assert not process.running(tmp_path)
