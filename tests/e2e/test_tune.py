"""Whole runs through the command line, in this process: what they leave, what they say, how they end."""

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from pairwise import few

from gemmpipe.cli.main import main
from gemmpipe.core.data import Problem
from gemmpipe.family import load_family
from gemmpipe.pipeline.runner import batches
from gemmpipe.report.reading import read_run
from gemmpipe.tables import store

Run = Callable[..., tuple[int, str, str]]


pytestmark = pytest.mark.usefixtures("own_locks")


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str], faulty_arguments: tuple[str, ...]) -> Run:
    """Types arguments after those of the faulty family; the exit code, stdout and stderr."""

    def typed(*arguments: str, first: str = "") -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([*([first] if first else []), *faulty_arguments, *arguments])
        out, error = capfd.readouterr()
        return code, out, error

    return typed


def _run_folder() -> Path:
    return max(Path("outputs/runs").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)


def _table(path: str = "outputs/tuned/faulty_tuned_gemm.csv") -> list[dict[str, object]]:
    return [dict(row) for row in store.read(Path(path), load_family("faulty"))]


def test_a_run_from_end_to_end(run: Run) -> None:
    code, out, error = run("profile=all.csv", "space.KIND=[right,unfit,untouched]", "stages.screen.margin_pct=1e6")
    assert code == 0
    assert error == "", "no warning of any library reaches the user"
    assert "capture: 2 problems of 1 product" in out
    assert "2 of 2 problems tuned" in out
    assert "export GEMMPIPE_CONFIG_FAULTY=" in out
    assert "resume with:" not in out, "it is finished"
    folder = _run_folder()
    for name in ("problems", "shortlist", "trials", "selections", "artifacts"):
        assert len(pd.read_csv(folder / f"{name}.csv")), name
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["exit_code"] == 0
    assert manifest["unsolved"] == []
    typed = shlex.split(manifest["provenance"]["recipe"])
    assert typed == ["gemmpipe", manifest["pipeline"], *manifest["overrides"]], "a shell reads it as it was typed"
    assert [Path(path).name for path in manifest["files"]] == ["faulty_tuned_gemm.csv"]
    assert {row["M"] for row in _table()} == {8, 16}
    profile = pd.read_csv("all.csv")
    assert not profile.duplicated(["M", "candidate"]).any()
    status = profile["config"].str.extract(r'"KIND":"(\w+)"')[0].to_frame("kind").assign(status=profile["status"])
    assert set(status[status["kind"] == "unfit"]["status"]) == {"unsupported"}
    # A launch that a busy machine delays can be too slow for the finals, where results are checked.
    assert {"incorrect"} <= set(status[status["kind"] == "untouched"]["status"]) <= {"incorrect", "pruned"}
    assert set(status[status["kind"] == "right"]["status"]) <= {"ok", "pruned"}
    not_run = profile["error"].fillna("").str.startswith("not run: ")  # its time with fewer rows was too long
    assert profile["us"].notna().equals(profile["status"].isin(["ok", "pruned"]) & ~not_run)

    code, out, error = run()
    assert (code, error) == (0, "")
    assert "capture: 2 problems of 1 product, 2 already tuned (use retune=true to tune again)" in out


def test_one_problem_is_told_as_one(run: Run) -> None:
    code, out, _ = run("shapes.items=[{M: 8, N: 32, K: 64}]", "space.KIND=[unfit]", "backend=[triton]")
    assert code == 1
    for printed in ("capture: 1 problem of 1 product\n", "screen: 1 problem, ", "bench: 1 problem, no finalist\n"):
        assert printed in out
    assert "export" not in out, "there is no table"


def test_batches_of_one_end_like_one_batch(run: Run) -> None:
    shapes = "shapes.items=[{M: 8, N: 32, K: 64}, {M: 8, N: 48, K: 64}, {M: 8, N: 64, K: 64}]"
    assert run(shapes, "batch=1", "space.PACE_MS=[0]")[0] == 0
    folder = _run_folder()
    assert len(pd.read_csv(folder / "problems.csv")) == 3
    assert len(pd.read_csv(folder / "selections.csv")) == 3
    assert len(pd.read_csv(folder / "artifacts.csv")) == 1
    assert len(_table()) == 3


def test_a_budget_of_time_ends_a_run_with_what_is_finished(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def monotonic() -> float:
            return 7.0 if Path("outputs/tuned/faulty_tuned_gemm.csv").exists() else 0.0

    monkeypatch.setattr("gemmpipe.core.signals.time", Clock)
    shapes = "shapes.items=[{M: 8, N: 32, K: 64}, {M: 8, N: 48, K: 64}, {M: 8, N: 64, K: 64}]"
    code, out, error = run(shapes, "batch=1", "budget_s=6", "cpu_budget_s=null")
    assert (code, error) == (0, "")
    assert "budget_s=6: time budget reached; unfinished problems are skipped" in out
    assert [row["N"] for row in _table()] == [32], "the first batch, whose table ended the time"
    assert "export GEMMPIPE_CONFIG_FAULTY=" in out
    assert run(shapes, "budget_s=0")[0] == 2


def test_rows_timed_beside_other_work_say_so_and_give_way(run: Run) -> None:
    assert run("device.shared=true", "space.KIND=[right]")[0] == 0
    assert {row["policy"] for row in _table()} == {"host interleaved shared_gpu"}
    assert "2 already tuned" in run("device.shared=true", "space.KIND=[right]")[1]
    assert run("space.KIND=[right]")[0] == 0
    assert {row["policy"] for row in _table()} == {"host interleaved"}, "who has the device alone times them anew"


def test_a_problem_without_a_valid_candidate_is_told_and_the_others_are_written(run: Run) -> None:
    code, out, error = run("backend=[faulty]", "space.KIND=[wrong_at_8]")
    assert code == 1
    assert "select: 1 of 2 problems solved" in out
    assert error.startswith("warning: no valid candidate for faulty M=8 N=32 K=64: 3 incorrect; for example: ")
    assert error.count("\n") == 1
    assert [row["M"] for row in _table()] == [16]
    assert json.loads((_run_folder() / "manifest.json").read_text())["unsolved"] == ["faulty M=8 N=32 K=64"]
    # Decided again, it still has none.
    assert run("reuse=last", "chain=[select,merge]")[0] == 1


def test_nothing_fits(run: Run) -> None:
    code, out, _ = run("backend=[faulty]", "space.KIND=[unfit]")
    assert code == 1
    assert "select: 0 of 2 problems solved" in out
    assert not Path("outputs/tuned/faulty_tuned_gemm.csv").exists()
    code, out, error = run("backend=[]")
    assert code == 1
    assert "screen: 2 problems, no candidate; 0 go on to bench" in out
    assert "K=64: the family has no kernels of these backends\n" in error
    (see,) = [line for line in out.splitlines() if line.startswith("see ")]
    assert f"gemmpipe show {_run_folder()}" in see, "`last` is a run with choices"
    (note,) = [note for note in read_run(_run_folder(), importable=frozenset({"faulty"})).notes if "no trials" in note]
    assert note == "The journal has no trials: no candidate was timed."


def test_capture_alone_writes_the_problems(run: Run) -> None:
    code, out, error = run(first="capture")
    assert (code, error) == (0, "")
    assert pd.read_csv(_run_folder() / "problems.csv")[["M", "N", "K"]].to_numpy().tolist() == [
        [8, 32, 64],
        [16, 32, 64],
    ]
    assert not Path("outputs/tuned").exists()
    assert "cpu:" not in out, "no worker was started"
    assert "resuming" not in out
    code, _, error = run(first="resume=last")
    assert (code, "no run that can be resumed" in error) == (2, True), "nothing is left to do"
    _, out, _ = run(first=f"resume={_run_folder()}")
    assert f"resuming: {_run_folder().resolve()}; the run had finished" in out


def test_reuse_decides_again_under_other_rules(run: Run) -> None:
    assert run("space.PACE_MS=[0]")[0] == 0
    first = {row["M"]: row["libtype"] for row in _table()}
    again = ("reuse=last", "chain=[select,merge]")
    preferring = {
        "torch": ["stages.select.prefer.torch=0.001"],
        "faulty": ["+stages.select.prefer.faulty=0.001", "~stages.select.prefer.torch"],
    }
    for preferred, arguments in preferring.items():
        code, _, error = run(*again, *arguments, f"output={preferred}")
        assert (code, error) == (0, "")
        assert {row["libtype"] for row in _table(f"{preferred}/faulty_tuned_gemm.csv")} == {preferred}
    # The same rules decide the same.
    assert run(*again, "output=same")[0] == 0
    assert {row["M"]: row["libtype"] for row in _table("same/faulty_tuned_gemm.csv")} == first


@pytest.mark.parametrize(
    ("key", "named"), [("output", "output"), ("profile", "profile"), ("format.csv.file", "format.csv")]
)
def test_what_cannot_be_written_is_told_before_any_tuning(run: Run, key: str, named: str) -> None:
    Path("file").write_text("")
    code, out, error = run(f"{key}={Path('file').resolve()}/there/x")
    assert code == 3
    assert out.count("\n") == 1  # what was to run
    assert error.startswith(f"gemmpipe: {named}: cannot write to {Path('file').resolve()}/there")
    assert error.count("\n") == 1
    assert not list(Path("outputs").glob("runs/*/*/trials.jsonl"))


def test_a_chain_that_cannot_work(run: Run) -> None:
    assert run("chain=[capture,bench]")[::2] == (
        2,
        "gemmpipe: chain: stage 'bench' needs shortlist, which no earlier stage gives; expected screen before it\n",
    )


def test_a_run_that_only_decided_again_has_no_trials_to_decide_from(run: Run) -> None:
    assert run()[0] == 0
    first = _run_folder()
    assert run(f"reuse={first}", "output=again")[0] == 0
    second = next(path for path in first.parent.iterdir() if path != first)
    code, _, error = run(f"reuse={second}", "chain=[select,merge]", "output=third")
    assert code == 2
    assert "needs trials, which no earlier stage nor the reused run gives" in error


def test_a_run_that_reused_another_goes_on_reusing_it(run: Run) -> None:
    assert run("space.PACE_MS=[0]")[0] == 0
    first = _run_folder()
    chain = "chain=[screen,bench,select,merge]"
    assert run(f"reuse={first}", chain, "space.PACE_MS=[0,1]", "output=again")[0] == 0
    second = max(first.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    before = (second / "trials.jsonl").read_text().count('"row":"trial"')
    assert before > 0, "of the points that the first had not"
    code, out, error = run(f"resume={second}")
    assert (code, error) == (0, "")
    assert f"resuming: {before} finished trials in {second.resolve()}" in out
    assert json.loads((second / "manifest.json").read_text())["config"]["reuse"] == str(first.resolve())
    assert (second / "trials.jsonl").read_text().count('"row":"trial"') == before


def test_a_finished_run_resumed_repeats_nothing_and_says_the_same(run: Run) -> None:
    assert run("space.KIND=[right,kill,spoil_row]", "space.PACE_MS=[0]")[0] == 0
    before = (_run_folder() / "trials.jsonl").read_text().splitlines()
    selections = (_run_folder() / "selections.csv").read_text()
    code, out, error = run("resume=last")
    assert (code, error) == (0, "")
    assert "resuming:" in out
    after = (_run_folder() / "trials.jsonl").read_text().splitlines()
    assert {json.loads(line)["row"] for line in after[len(before) :]} == {"session", "problem"}
    chosen = ["M", "libtype", "config", "us"]
    now = pd.read_csv(_run_folder() / "selections.csv")[chosen]
    pd.testing.assert_frame_equal(now, pd.read_csv(io.StringIO(selections))[chosen])


def test_times_of_an_earlier_method_keep_its_name(run: Run) -> None:
    """A refused `resume` leaves the journal as it is; a run that times nothing has the policy of what it reuses."""
    assert run("space.KIND=[right]", "space.PACE_MS=[0]")[0] == 0
    earlier = _run_folder()
    journal = earlier / "trials.jsonl"
    journal.write_text(journal.read_text().replace('"host interleaved"', '"host once"'))
    before = journal.read_bytes()
    code, _, error = run("resume=last")
    assert code == 2
    assert error.splitlines()[-1].startswith("gemmpipe: resume: its times are 'host once', new ones 'host interleaved'")
    assert journal.read_bytes() == before
    assert run(f"reuse={earlier}", "chain=[select,merge]", "output=again")[0] == 0
    sessions = [json.loads(line) for line in (_run_folder() / "trials.jsonl").read_text().splitlines()]
    assert [row["policy"] for row in sessions if row["row"] == "session"] == ["host once"]
    (table,) = Path("again").glob("*.csv")
    assert all(policy.startswith("host once") for policy in pd.read_csv(table)["policy"])


def test_siblings_stay_together_in_batches() -> None:
    problems = [Problem(family="f", key=(("M", m), ("N", n), ("K", 1))) for m in (1, 2, 3) for n in (1, 2, 3, 4)]
    for size in range(1, 14):
        found = list(batches(problems, size, load_family("a16w16")))
        assert sorted(p.id for batch in found for p in batch) == sorted(p.id for p in problems)
        for batch in found:
            assert len(batch) <= max(size, 3)
            assert all(sum(p["N"] == n for p in batch) in (0, 3) for n in (1, 2, 3, 4))
    assert list(batches([], 3, load_family("a16w16"))) == []


def test_routings_of_one_mixture_stay_together_in_batches() -> None:
    """They try each other's fastest candidates after their searches."""
    problems = [
        Problem(family="fmoe", key=(("token", m), ("expert", experts), ("routing", routing)), rows_column="token")
        for routing in (None, "uniform", "skewed")
        for experts in (8, 128)
        for m in (1, 16)
    ]
    found = list(batches(problems, 4, load_family("fmoe")))
    assert [{p["expert"] for p in batch} for batch in found] == [{8}, {128}]
    assert [len(batch) for batch in found] == [6, 6]


@pytest.mark.parametrize(
    ("word", "printed"),
    few(
        [
            ("space.BLOCK_SIZE_M=foo", "space.BLOCK_SIZE_M: 'foo', expected a power of two"),
            ("space.BLOCK_SIZE_N=[72]", "space.BLOCK_SIZE_N: 72, expected a power of two or a multiple of 16"),
            ("space.num_warps=[4,3]", "space.num_warps: 3, expected a power of two"),
            ("space.num_stages=[-1]", "space.num_stages: -1, expected a whole number from 1"),
            ("space.kpack=[x]", "space.kpack: 'x', expected a whole number from 0"),
            ("space.cache_modifier=[.cgg]", "space.cache_modifier: '.cgg', expected one of '', '.ca', '.cg'"),
            ("space.SWAP_AB=[1]", "space.SWAP_AB: 1, expected true or false"),
            ("space.kernel_type=stremed", "sliced; did you mean 'streamed'?"),
            ("stages.select.prefer.tirton=0.9", "stages.select.prefer.tirton: no such backend; did you mean 'triton'?"),
            (
                "format.triton_json.buckets={low:{high:32,BLOCK_SIZ_M:32},rest:null}",
                "format.triton_json.buckets.low.BLOCK_SIZ_M: no such knob; did you mean 'BLOCK_SIZE_M'?",
            ),
        ],
        0,
        3,
        6,
    ),
)
def test_what_no_candidate_can_have_is_told_before_anything_runs(
    word: str, printed: str, folder: Path, refusal: Callable[..., str]
) -> None:
    assert printed in refusal("kernel=a16w16", "shapes=list", "shapes.items=[[8,64,64]]", "device=cpu", word)


@pytest.mark.parametrize("backends", ["[streamed]", "[sliced,skinny]"])
def test_values_are_checked_whatever_the_backends(backends: str, folder: Path, refusal: Callable[..., str]) -> None:
    words = ["kernel=a16w16", "shapes=list", "shapes.items=[[1,64,64]]", "device=cpu", f"backend={backends}"]
    assert "space.BLOCK_SIZE_N: 24, expected a power of two" in refusal(*words, "space.BLOCK_SIZE_N=24")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["backend=[streamed,sliced]"], "streamed: no GPU: Triton compiles for GPUs, sliced: no GPU"),
        (["backend=[fused]"], "the family has no kernels of these backends"),
    ],
)
def test_backends_without_a_candidate_say_why(
    words: list[str], reason: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["kernel=a16w16", "shapes=list", "shapes.items=[[1,64,64]]", "device=cpu"]
    assert main([*given, *words]) != 0
    assert "no valid candidate for a16w16 M=1 N=64 K=64 bias=False dtype=bfloat16 outdtype=bfloat16" in (
        printed := capfd.readouterr().err
    )
    assert reason in " ".join(printed.split())


def test_a_named_backend_that_cannot_be_timed_is_said(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where rows are reused, which were chosen without it."""
    given = ["kernel=a16w16", "shapes=list", "shapes.items=[[4,64,64]]", "device=cpu", "output=tuned"]
    assert main([*given, "backend=[default,deepgemm]"]) == 0
    printed = capfd.readouterr().out
    (line,) = [line for line in printed.splitlines() if ": not timed: " in line]
    assert line == "deepgemm: not timed: not for this product: scales: 1x128 x 128x128 only"
    assert main([*given, "backend=[default,peers]"]) == 0
    printed = capfd.readouterr().out
    assert "  the run that chose these rows was without peers: retune=true times them too\n" in printed
    assert ": not timed" not in printed
    assert main([*given, "backend=[engine_pairs]", "retune=true", "output=other"]) == 1
    out, error = capfd.readouterr()
    assert "      gemmpipe doctor kernel=a16w16 device=cpu 'backend=[engine_pairs]'\n" in out
    assert "vllm: not for this product: operands: " in " ".join(error.split())
    assert main(["show", next(line for line in out.splitlines() if line.startswith("run ")).split()[1]]) == 0
    assert "no product has a choice" in capfd.readouterr().out
