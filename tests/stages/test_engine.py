"""Whole runs with a format for an engine's own function: searches, files, and resumed runs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd
import pytest

from gemmpipe import journal
from gemmpipe.cli.main import main
from gemmpipe.cli.progress import Terminal
from gemmpipe.core.events import Event
from gemmpipe.stages.engine.expected import AfterScreening

LIKE = Path(__file__).parents[1] / "engine_like"
NAME = "N=128,K=128,device_name={},dtype=fp8_w8a8,block_shape=[128,128].json"
PLAIN = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
Run = Callable[..., tuple[int, str, str]]

pytestmark = [pytest.mark.usefixtures("own_locks"), pytest.mark.e2e]


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Tunes two Ms for an engine with modelled times; returns exit code, stdout and stderr."""

    def run_gemmpipe(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        given = (
            f"--config-dir={LIKE}",
            "kernel=engine_like",
            "space@stages.engine.spaces.dense=engine_like",
            "shapes=list",
            "shapes.items=[{M: [8, 64], N: 128, K: 128}]",
            "device=cpu",
            "stages.bench.max_foreign_pct=null",  # other tests use the cores
            "format=[vllm]",
            "timer@stages.bench.timer=quick",
            "executor=told",
        )
        code = main([*given, *args])
        out, error = capfd.readouterr()
        return code, out, error

    return run_gemmpipe


def _file() -> Mapping[str, Mapping[str, object]]:
    (path,) = Path("outputs/tuned/vllm").glob("N=*.json")
    found: Mapping[str, Mapping[str, object]] = json.loads(path.read_text())
    return found


def _run_folder() -> Path:
    return max(Path("outputs/runs").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)


def _trials(stage: str) -> set[str]:
    """Ids of problems with trials at a stage of the latest run."""
    return {trial.problem for trial in journal.read(_run_folder()).at(stage)}


def _published(entries: Mapping[str, Mapping[str, object]]) -> str:
    """A folder with the engine's own file for this machine."""
    from gemmpipe.core.device import cpu_device

    folder = Path("published")
    folder.mkdir(exist_ok=True)
    name = "_".join(cpu_device().name.replace("/", " ").split())
    (folder / NAME.format(name)).write_text(json.dumps(entries))
    return f"stages.engine.published=[{folder}]"


def test_with_an_engines_format_alone_only_its_function_is_searched(run: Run) -> None:
    code, out, error = run()
    assert (code, error) == (0, "")
    assert {m: (e["BLOCK_SIZE_M"], e["num_stages"]) for m, e in _file().items()} == {"8": (16, 3), "64": (64, 3)}
    assert _trials("bench") == set(), "no format needs the best of all candidates"
    timed = {int(p.split("M=")[1].split()[0]) for p in _trials("bench vllm")}
    assert timed == {1, 8, 23, 64, 128}, "keys, their mean, and one M beyond each end"
    assert "engine: vllm: this engine is a test's; a kernel of its form is timed" in out
    assert "select: vllm: 2 entries, 2 new, 0 as the engine has them" in out
    assert "engine_vllm " in out, "its duration is reported"
    chosen = pd.read_csv(_run_folder() / "selections.csv")
    assert set(chosen["format"]) == {"vllm"}
    assert (chosen["ratio_high"] < 1).all()


def test_the_finals_of_keys_that_are_added_are_expected_before_the_screening(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[AfterScreening] = []
    events: list[Event] = []
    init, call = AfterScreening.__init__, Terminal.__call__
    monkeypatch.setattr(AfterScreening, "__init__", lambda self, *a, **k: (init(self, *a, **k), made.append(self))[0])
    monkeypatch.setattr(Terminal, "__call__", lambda self, event: (events.append(event), call(self, event))[0])
    assert run()[0] == 0
    screen, bench = (next(e for e in events if e.kind == "stage" and e.text == name) for name in ("screen", "bench"))
    (after,) = made
    assert after.finals == bench.total > 2, "two keys, and the Ms between and beside them"
    assert screen.rest_s == pytest.approx(after.seconds({}))
    assert bench.rest_s == 0
    known_s = after.seconds({problem.id: 1000.0 for problem in after.screened})
    assert known_s == pytest.approx(after.finals_s({problem.id: 1000.0 for problem in after.screened}))
    assert 0 < after.seconds({problem.id: 10.0 for problem in after.screened}) <= known_s


@pytest.mark.slow
def test_with_other_formats_all_candidates_are_timed_too(run: Run) -> None:
    code, out, error = run("format=[csv,vllm]", "backend=[torch]")
    assert (code, error) == (0, "")
    assert "2 of 2 problems tuned" in out
    assert len(_trials("bench")) == 2
    assert set(_file()) == {"8", "64"}
    table = pd.read_csv("outputs/tuned/engine_like_tuned_gemm.csv")
    assert set(table["libtype"]) == {"torch"}, "an engine's function is not among the problems' candidates"


def test_without_such_a_format_the_stage_does_nothing(run: Run) -> None:
    code, out, _ = run("format=[csv]", "backend=[torch]")
    assert code == 0
    assert "engine:" not in out
    assert _trials("bench vllm") == set()


def test_a_published_entry_stays_where_nothing_is_faster(run: Run) -> None:
    best = {**PLAIN, "GROUP_SIZE_M": 64}  # as fast as the space's best for 8 rows, and not in the space
    slow = {**PLAIN, "BLOCK_SIZE_M": 64, "num_stages": 1}
    entries = {"8": best, "64": slow, "4096": {**slow, "num_warps": 8}}
    code, _, error = run(_published(entries))
    assert (code, error) == (0, "")
    found = _file()
    assert found["8"] == best
    assert found["64"]["num_stages"] == 3
    assert found["4096"] == entries["4096"], "untuned keys are kept"


def test_an_entry_that_cannot_be_timed_stays(run: Run) -> None:
    entries = {"8": {**PLAIN, "num_stages": 7}, "64": {**PLAIN, "num_stages": 1}}
    assert run(_published(entries))[0] == 0
    assert _file()["8"] == entries["8"]
    assert _file()["64"]["num_stages"] == 3


def test_an_m_between_keys_gets_a_key_where_another_candidate_is_faster(run: Run) -> None:
    shapes = "shapes.items=[{M: [16, 256], N: 128, K: 128}]"
    # 16 rows of tiles for 256 rows, 4 for 64: a tile of 16 rows is best for 16 of them, one of 64 for the middle.
    assert run(shapes)[0] == 0
    assert {m: e["BLOCK_SIZE_M"] for m, e in _file().items()} == {"16": 16, "64": 64, "256": 64}


def test_the_outputs_entries_are_compared_too(run: Run) -> None:
    assert run()[0] == 0
    first = _file()
    assert run("space.num_stages=[1]", "stages.engine.spaces.dense.num_stages=[1]")[0] == 0
    assert _file() == first, "slower ones do not replace them"


def test_a_finished_run_is_resumed_without_timing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run()[0] == 0
    first, folder = _file(), _run_folder()
    before = journal.read(folder).count
    (path,) = Path("outputs/tuned/vllm").glob("N=*.json")
    path.unlink()
    assert main([f"--config-dir={LIKE}", f"resume={folder}"]) == 0
    assert journal.read(folder).count == before
    assert _file() == first


@pytest.mark.slow
def test_reuse_selects_again_without_a_device(run: Run) -> None:
    assert run()[0] == 0
    first, folder = _file(), _run_folder()
    code, _, error = run(f"reuse={folder}", "chain=[select,merge]", "output=again")
    assert (code, error) == (0, "")
    (path,) = Path("again/vllm").glob("N=*.json")
    assert json.loads(path.read_text()) == first


def test_a_missing_path_is_a_usage_error(run: Run) -> None:
    code, _, error = run("stages.engine.published=[no/such/folder]")
    assert code == 2
    assert "stages.engine.published: no/such/folder: no such file or folder" in error
