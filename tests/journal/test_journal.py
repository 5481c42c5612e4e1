"""The journal: all accepted rows are read back, also after a kill or on a full disk."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gemmpipe import journal
from gemmpipe.core.data import BuildFacts, Candidate, Device, Status, Trial
from gemmpipe.core.errors import EnvironmentProblem, UserError
from gemmpipe.journal import Journal, Record

A, B = Candidate.of("triton", {"BLOCK_SIZE_M": 16}), Candidate.of("torch", {"method": "mm"})
FACTS = BuildFacts(compile_s=1.0, shared_bytes=0, registers=1, spills=0, error="")
PROBLEM = "f M=1 N=2 K=3"


def _trial(candidate: Candidate, *, stage: str = "screen", launches: int = 1, us: float = 5.0) -> Trial:
    samples = (us, us + 1) if launches else ()
    status = Status.OK if launches else Status.DIED
    return Trial(
        stage=stage, problem=PROBLEM, candidate=candidate, status=status, launches=launches, samples_us=samples
    )


def _write(folder: Path, device: Device) -> None:
    written = Journal(folder)
    written.kernel_names[A.id] = "kernel@12345678"
    written.write("session", device=asdict(device))
    written.write("problem", id=PROBLEM, key={"M": 1, "N": 2, "K": 3}, weight=2.0, layer="qkv")
    written.launch("screen", PROBLEM, [A, B])
    written.trial(_trial(A))
    written.trial(_trial(B, launches=0))
    written.trial(_trial(A, stage="bench", launches=16))
    written.write("done", stage="bench", problem=PROBLEM)
    written.close()
    written.close()


def _counts(record: Record) -> tuple[int, int, int, int]:
    return len(record.sessions), len(record.problems), record.count, len(record.finished)


def test_rows_are_read_back(tmp_path: Path, h200: Device) -> None:
    _write(tmp_path, h200)
    record = journal.read(tmp_path)
    assert _counts(record) == (1, 1, 3, 1)
    assert record.skipped == []
    assert record.find("screen", PROBLEM, A, 1) == _trial(A)
    assert record.find("screen", PROBLEM, A, 4) is None
    assert record.find("screen", PROBLEM, B, 4) == _trial(B, launches=0), (
        "a failure is found for every number of launches"
    )
    assert record.of("bench", PROBLEM) == [_trial(A, stage="bench", launches=16)]
    assert record.of("bench", "another") == []
    assert record.finished == {("bench", PROBLEM)}
    assert record.kernel_names == {A.id: "kernel@12345678", B.id: "torch"}


def test_builds_and_their_facts_belong_to_candidates_of_a_problem(tmp_path: Path) -> None:
    other = "f M=1 N=2 K=4"
    written = Journal(tmp_path)
    written.builds = {(PROBLEM, A.id): ("b1",), (other, A.id): ("b1", "b2")}
    for name in ("b1", "b2"):
        written.write("build", id=name, compile_s=0.5, shared_bytes=64, registers=40, spills=None, error="")
    for problem in (PROBLEM, PROBLEM, other):
        written.trial(replace(_trial(A), problem=problem))
    written.close()
    record = journal.read(tmp_path)
    assert record.builds == {(PROBLEM, A.id): ("b1",), (other, A.id): ("b1", "b2")}
    assert record.facts["b2"] == BuildFacts(compile_s=0.5, shared_bytes=64, registers=40, spills=None)
    assert (tmp_path / journal.NAME).read_text().count('"row":"candidate"') == 2, (
        "written again only if the builds differ"
    )


def test_all_fields_of_a_trial_are_read_back(tmp_path: Path) -> None:
    trial = Trial(
        stage="bench",
        problem=PROBLEM,
        candidate=A,
        status=Status.INCORRECT,
        err_ratio=0.25,
        extra_weight_bytes=7,
        shared=True,
        no_dependent_launch=True,
        full_clocks_us=12.5,
        error='line one\nand a quote " and \N{GREEK SMALL LETTER MU}',
    )
    with_file = Journal(tmp_path)
    with_file.trial(trial)
    with_file.close()
    assert journal.read(tmp_path).of("bench", PROBLEM) == [trial]


def test_the_last_trial_of_a_candidate_counts(tmp_path: Path) -> None:
    """Two sessions may time one finalist with different numbers of launches: only the later trial counts."""
    for launches, us in ((16, 5.0), (32, 6.0), (16, 7.0)):
        session = Journal(tmp_path)
        session.trial(_trial(A, stage="bench", launches=launches, us=us))
        session.close()
        (found,) = journal.read(tmp_path).of("bench", PROBLEM)
        assert (found.launches, found.samples_us[0]) == (launches, us)


def test_no_journal_is_an_empty_record(tmp_path: Path) -> None:
    assert _counts(journal.read(tmp_path)) == (0, 0, 0, 0)


def test_a_truncated_journal_loses_one_row_at_most(tmp_path: Path, h200: Device) -> None:
    _write(tmp_path, h200)
    path = tmp_path / journal.NAME
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        entire = whole[:length].count(b"\n")
        torn = length > sum(len(line) for line in lines[:entire])
        record = journal.read(tmp_path)
        # A line without its line break is complete.
        complete = entire + (torn and length == sum(len(line) for line in lines[: entire + 1]) - 1)
        assert len(record.skipped) == (complete == entire and torn)
        kinds = [json.loads(line)["row"] for line in lines[:complete]]
        assert _counts(record) == tuple(kinds.count(kind) for kind in ("session", "problem", "trial", "done"))
        if length % 7 == 0:
            after = Journal(tmp_path)
            after.trial(_trial(B, stage="bench", launches=16))
            after.close()
            appended = journal.read(tmp_path)
            assert _trial(B, stage="bench", launches=16) in appended.of("bench", PROBLEM)
            assert appended.count == record.count + 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\xfe\x80\n",
        b"{}\n",
        b"[1, 2]\n",
        b"null\n",
        b'"row"\n',
        b'{"row": "trial"}\n',
        b'{"row": "trial", "stage": "screen", "problem": "p", "candidate": "unknown", "status": "ok"}\n',
        b'{"row": "candidate", "id": "x", "backend": "b", "knobs": 3}\n',
        b'{"row": "problem", "id": "p", "key": 1}\n',
        b'{"row": "session", "device": {"kind": "cuda"}}\n',
        b'{"row": ["trial"]}\n',
        b"[" * 100_000 + b"\n",
        b'{"row": ' + b"9" * 10_000 + b"}\n",
    ],
    ids=lambda line: line[:20].decode("latin-1").strip(),
)
def test_garbage_between_rows_is_skipped_and_counted(tmp_path: Path, h200: Device, garbage: bytes) -> None:
    _write(tmp_path, h200)
    path = tmp_path / journal.NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line + garbage for line in lines))
    record = journal.read(tmp_path)
    assert _counts(record) == (1, 1, 3, 1)
    assert record.skipped in ([], [2 * i for i in range(1, len(lines) + 1)])


def test_names_of_earlier_journals_are_read(tmp_path: Path, h200: Device) -> None:
    """`home`, `cut`, `whole` and `asked` mean `assignment`, `cut_short`, `complete` and `requested_launches`."""
    written = Journal(tmp_path)
    written.write("session", device=asdict(h200))
    written.write("assignment", problem=PROBLEM, device="GPU-1")
    written.trial(replace(_trial(A, stage="screen", launches=4), requested_launches=2))
    for problem in (PROBLEM, "other"):
        written.write("cut_short", problem=problem)
    written.write("complete", problem=PROBLEM)
    written.close()
    path = tmp_path / journal.NAME
    text = path.read_text()
    earlier = {"requested_launches": "asked", "assignment": "home", "cut_short": "cut", "complete": "whole"}
    for name, old in earlier.items():
        assert f'"{name}"' in text
        path.write_text(path.read_text().replace(f'"{name}"', f'"{old}"'))
    found = journal.read(tmp_path)
    (trial,) = found.of("screen", PROBLEM)
    assert (found.skipped, found.assignments, found.cut_short) == ([], {PROBLEM: "GPU-1"}, {"other"})
    assert trial.requested_launches == 2


def test_rows_of_a_later_version_are_skipped(tmp_path: Path, h200: Device) -> None:
    _write(tmp_path, h200)
    after = Journal(tmp_path)
    after.write("later_kind", value=True)
    after.close()
    assert _counts(journal.read(tmp_path)) == (1, 1, 3, 1)


@pytest.mark.e2e
def test_two_processes_cannot_write_one_journal(tmp_path: Path) -> None:
    held = Journal(tmp_path)
    held.write("session")
    code = f"from pathlib import Path; from gemmpipe.journal import Journal; Journal(Path({str(tmp_path)!r}))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines()[-1].endswith("trials.jsonl: another gemmpipe is still at work on this run")
    with pytest.raises(UserError, match="another gemmpipe"):
        Journal(tmp_path)
    held.close()
    Journal(tmp_path).close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot write the journal"):
        Journal(tmp_path / "file")


FULL = """
import resource, sys
from pathlib import Path
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.journal import Journal
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
written = Journal(Path(sys.argv[1]))
try:
    for number in range(100):
        written.write("done", stage="bench", problem=str(number))
        print(number, flush=True)
except EnvironmentProblem as error:
    print(error)
written.close()
"""


@pytest.mark.e2e
def test_a_full_disk_is_reported_and_accepted_rows_are_kept(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    *accepted, message = ended.stdout.splitlines()
    assert message.endswith("cannot write the journal: File too large; resume=last")
    record = journal.read(tmp_path)
    assert {int(problem) for _, problem in record.finished} >= {int(number) for number in accepted}


def test_a_journal_deleted_during_its_run_is_restored(tmp_path: Path, h200: Device) -> None:
    folder = tmp_path / "outputs" / "run"
    written = Journal(folder)
    written.write("session", device=asdict(h200))
    written.trial(_trial(A))
    shutil.rmtree(tmp_path / "outputs")
    written.trial(_trial(B, launches=0))
    written.sync()
    with pytest.raises(UserError, match="still at work"):
        Journal(folder)
    written.trial(_trial(A, stage="bench", launches=16))
    written.close()
    record = journal.read(folder)
    assert (_counts(record), record.skipped) == ((1, 0, 3, 0), [])


INVALID = [
    *(
        ("session", "device", {"gfx": gfx})
        for gfx in ("../../../tmp/x", "/tmp/x", "a b", "", "sm_\u0669\u0660", "\0", 90)
    ),
    *(("session", "device", {"cu_num": units}) for units in (0, -1, "132", 1.5, True, 10**30)),
    *(("session", "device", {"name": name}) for name in ("a\nb", "\ud800", "\x1b[2J", "x" * 100_000, None)),
    *(("candidate", "knobs", {"a": value}) for value in ([1], {"b": 1}, float("nan"), "\ud800")),
    *(("candidate", "kernel", name) for name in ("x" * 200_000, "a\x1bb", ["x"])),
    *(("problem", "weight", weight) for weight in (0, -1, float("nan"), float("inf"), "x", None)),
    *(("problem", "key", key) for key in ({"M": "a\nb"}, [1], "M")),
    *(("trial", "samples_us", times) for times in ([0], [-1.0], [float("nan")], [1e308, 1e308], ["x"], 5, [[1]])),
    *(("trial", "samples_us", times) for times in ([1e-300], [True], ["5"])),
    *(("trial", "launches", number) for number in (-1, float("inf"), "3", 1.5, True)),
    *(("trial", "err_ratio", error) for error in (-1, float("nan"), "x", [1])),
    *(("trial", "extra_weight_bytes", number) for number in (float("inf"), -1, "x")),
    *(("trial", "status", status) for status in ("fine", None, [])),
    ("trial", "error", "\ud800"),
    ("trial", "tuning", {"seconds": "x", "tried": 1, "of": 1, "compiled": 1}),
    *(("build", "registers", number) for number in ("x", -1, [1])),
]
"""(row kind, field, invalid value): each would end up in a table or in the name of a file."""


@pytest.mark.parametrize(("kind", "name", "value"), INVALID, ids=lambda each: str(each)[:12])
def test_a_row_with_an_invalid_value_is_skipped(
    kind: str, name: str, value: object, tmp_path: Path, h200: Device
) -> None:
    _write(tmp_path, h200)
    path = tmp_path / journal.NAME
    rows = [*map(json.loads, path.read_text().splitlines()), {"row": "build", **asdict(FACTS)}]
    row = next(row for row in rows if row["row"] == kind)
    row[name] = {**row[name], **value} if kind == "session" and isinstance(value, dict) else value
    before = len(path.read_bytes().splitlines())
    with path.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    record = journal.read(tmp_path)
    assert record.skipped == [before + 1]
    assert _counts(record) == (1, 1, 3, 1)


def test_rows_have_the_seconds_since_their_session_began(
    tmp_path: Path, h200: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [50.0]
    monkeypatch.setattr("gemmpipe.journal.writer.time.monotonic", lambda: clock[0])
    written = Journal(tmp_path)
    for start in (100.0, 900.0):
        clock[0] = start
        written.write("session", device=asdict(h200))
        clock[0] = start + 1.25
        written.build("b", FACTS)
        clock[0] = start + 2.5
        written.trial(_trial(A, us=start))
        written.write("conditions", device="cuda:0", sm_mhz=1980, power_w=None)
    written.close()
    log = journal.read(tmp_path).log
    assert [(each.session, each.t_s) for each in log] == [(s, t) for s in (0, 1) for t in (1.25, 2.5, 2.5)]
    assert [each.content for each in log[3:]] == ["b", _trial(A, us=900.0), {"device": "cuda:0", "sm_mhz": 1980}]


def test_rows_of_before_have_no_time_and_a_bad_time_is_a_bad_row(tmp_path: Path, h200: Device) -> None:
    _write(tmp_path, h200)
    path = tmp_path / journal.NAME
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    trials = [row for row in rows if row["row"] == "trial"]
    del trials[0]["t"]
    trials[1]["t"] = -1
    trials[2]["t"] = "soon"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = journal.read(tmp_path)
    assert [each.t_s for each in record.log] == [None]
    assert record.count == 1
    assert len(record.skipped) == 2
