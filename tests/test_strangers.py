"""Files from strangers: what was tried to make one run code, write elsewhere, take over a terminal or never end."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmpipe.cli.main import main
from gemmpipe.cli.progress import Terminal
from gemmpipe.errors import UserError
from gemmpipe.events import Event
from gemmpipe.family import load_family
from gemmpipe.plan import Plan
from gemmpipe.runtime.captured import Recorder
from gemmpipe.tables.store import open_sheet, render
from gemmpipe.tables.uniting import Judge, entries_of, unite

Refusal = Callable[..., str]
AXES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "NUM_KSPLIT", "num_warps", "num_stages")
CALLBACK = "# @package hydra.callbacks\nx:\n  _target_: builtins.open\n  file: {mark}\n  mode: w\n"
"""An option that Hydra composes among its callbacks, and instantiates before any configuration is built."""


@pytest.fixture
def mark(folder: Path) -> Path:
    """What a stranger's code would make."""
    return folder / "code-was-run"


def _recipe(folder: Path, text: str) -> str:
    path = folder / "r.yaml"
    path.write_text(f"version: 1\n{text}\n")
    return str(path)


@pytest.mark.parametrize("form", ["search: '{}'", "format: [csv, '{}']", "sweep: {{search: [halving, '{}']}}"])
def test_a_recipe_cannot_bring_an_option_of_its_own(
    form: str, folder: Path, mark: Path, refusal: Refusal, plans: list[Plan]
) -> None:
    (folder / "evil.yaml").write_text(CALLBACK.format(mark=mark))
    for name in (f"../../../../../../../../../../../..{folder}/evil", f"{folder}/evil", "..\\evil", "a/../../evil"):
        assert "expected the name of an option" in refusal(_recipe(folder, form.format(name)))
    assert not mark.exists()
    assert plans == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("resume: evil", "resume: goes on with a run, whose words would be read from its folder"),
        ("reuse: evil", "reuse: reads another run"),
        ("executor: ray\nexecutor.address: ray://evil:1", "executor.address: connects to a cluster"),
        ("executor: {address: 'ray://evil:1'}", "executor.address: connects to a cluster"),
        ("search/../hydra/callbacks: x", "not for a recipe"),
        ("a..b: x", "not for a recipe"),
        ("pipeline: ../../evil", "no such pipeline"),
        ("output: /etc/gemmpipe", "output: '/etc/gemmpipe' lies elsewhere; expected a place below this folder"),
        ("output: ../elsewhere", "lies elsewhere"),
        ("output: ~/elsewhere", "lies elsewhere"),
        ("output: away/x", "lies elsewhere"),
        ('output: "a\\0b"', "lies elsewhere"),
        ("profile: /tmp/x.csv", "profile: '/tmp/x.csv' lies elsewhere"),
        ("format.csv.file: /tmp/x.csv", "format.csv.file: '/tmp/x.csv' lies elsewhere"),
        ("format: {csv: {file: ../x.csv}}", "format.csv.file: '../x.csv' lies elsewhere"),
        ("sweep: {output: [a, ../b]}", "output: '../b' lies elsewhere"),
        ("shapes: csv\nshapes.path: x\nbatch: 1e400", "batch: "),
        ("shapes: {a: " + "{a: " * 40 + "1" + "}" * 40 + "}", "nested more than 32 deep"),
        ("stages.screen.keep: " + "9" * 5000, ""),
        ("batch: 0x" + "F" * 5000, "batch: a whole number of 20,000 bits"),
        ("batch: 1" + ":59" * 500 + ".5", "not readable as YAML"),
        ("batch: !!int ''", "tags such as"),
        ("batch: !!timestamp x", "tags such as"),
        ("batch: !!python/object/apply:os.system [id]", "tags such as"),
        ('shapes.path: "\\ud800"', "is no text"),
        ("batch: [" + "[]," * 30_000 + "]", "values; expected a recipe"),
        ("batch: [" + "16, " * 2000 + "16]", "more than 2,000 values"),
        ("space: {" + ", ".join(f"{axis}: {[16] * 20}" for axis in AXES) + "}", "points, expected at most 20,000,000"),
        ("executor.compile_workers: 1000000", "executor.compile_workers: 1000000 given, expected at most 4096"),
        ("format.triton_json.device_name: ../../etc/x", "device_name: '../../etc/x', expected a name"),
        ('format.triton_json.device_name: "a\\0b"', "expected a name"),
    ],
    ids=lambda text: text[:40],
)
def test_a_recipe_cannot_write_elsewhere_connect_or_never_end(
    text: str, said: str, folder: Path, refusal: Refusal, plans: list[Plan]
) -> None:
    (folder / "away").symlink_to("/tmp")
    begun = time.monotonic()
    assert said in refusal(_recipe(folder, text))
    assert plans == []
    assert time.monotonic() - begun < 20


def test_a_recipe_of_backslashes_takes_no_longer_than_another(folder: Path, plans: list[Plan]) -> None:
    begun = time.monotonic()
    assert main([_recipe(folder, "kernel: a16w16\nprofile: '" + "\\" * 90_000 + "'")]) == 0
    assert plans[0].profile == "\\" * 90_000
    assert time.monotonic() - begun < 20


def test_what_a_recipe_may_not_name_the_command_line_may(folder: Path, plans: list[Plan]) -> None:
    elsewhere = folder.parent / "elsewhere"
    assert main([_recipe(folder, "output: here/below"), f"profile={elsewhere}/x.csv"]) == 0
    assert main([_recipe(folder, "kernel: a16w16"), f"output={elsewhere}"]) == 0
    assert [plan.output for plan in plans] == ["here/below", str(elsewhere)]


@pytest.mark.parametrize("where", ["", "output: out\n", "sweep: {output: [out, out2]}\n"])
def test_a_recipe_names_no_file_behind_a_link_of_its_repository(
    where: str, folder: Path, capsys: pytest.CaptureFixture[str], plans: list[Plan]
) -> None:
    """The path from here is harmless; the one from the output folder, which the whole command line tells, is not."""
    for output in ("out", "out2", "outputs/tuned"):
        (folder / output).mkdir(parents=True)
        (folder / output / "link").symlink_to("/tmp")
    recipe = _recipe(folder, f"{where}format: [csv]\nformat.csv: {{file: link/x.csv}}")
    assert main([recipe]) == 2
    assert "link/x.csv lies elsewhere; expected a place below this folder" in capsys.readouterr().err
    (folder / "outputs" / "tuned" / "aiter").symlink_to("/tmp")
    assert main([_recipe(folder, "format: [aiter]\nformat.aiter.file: x.csv")]) == 2
    (folder / "outputs" / "tuned" / "aiter").unlink()
    assert plans == []
    (folder / "outputs" / "tuned" / "link").unlink()
    (folder / "outputs" / "tuned").rmdir()
    (folder / "outputs" / "tuned").symlink_to("/tmp")
    assert main([_recipe(folder, "format: [csv]\nformat.csv.file: profile")]) == 2
    assert plans == []
    assert main([_recipe(folder, "format: [csv]\nformat.csv.file: x.csv"), "output=/tmp/y"]) == 0
    assert main([_recipe(folder, "format: [csv]"), "format.csv.file=x.csv"]) == 0
    assert main([_recipe(folder, "format: [csv]")]) == 0, "your own link to where there is room"
    assert len(plans) == 3


def test_third_party_code_comes_from_words_on_the_command_line_alone(
    folder: Path, refusal: Refusal, mark: Path
) -> None:
    options = folder / "theirs" / "backend"
    options.mkdir(parents=True)
    (options / "own.yaml").write_text("own:\n  _target_: their_backend.Own\n")
    (folder / "theirs" / "their_backend.py").write_text(f"open({str(mark)!r}, 'w')\n")
    recipe = _recipe(folder, "backend: [own]")
    assert "backend: no option 'own'" in refusal(recipe)
    assert "not allowed in a recipe" in refusal(_recipe(folder, "backend: {own: {_target_: their_backend.Own}}"))
    assert not mark.exists()
    # The user's own word brings it in, also under a recipe: then its code is run, and found to be no backend.
    recipe = _recipe(folder, "backend: [own]")
    assert main([recipe, "--config-dir", str(folder / "theirs")]) != 0
    assert mark.exists()


def _run_of_a_stranger(folder: Path, overrides: object, config_dir: str | None = None) -> Path:
    run = folder / "theirs" / "run"
    (run / ".hydra").mkdir(parents=True, exist_ok=True)
    (run / "trials.jsonl").write_text('{"row":"session"}\n{"row":"x"}\n')
    sources = [{"provider": "command-line", "path": config_dir}] if config_dir else []
    hydra = {"hydra": {"job": {"config_name": "tune"}, "runtime": {"config_sources": sources}}}
    (run / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(hydra))
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    return run


@pytest.mark.parametrize("key", ["resume", "reuse"])
@pytest.mark.parametrize(
    "word",
    [
        "+hydra.callbacks.x._target_=builtins.open",
        "hydra.searchpath=[file:///tmp]",
        "search=../../../../../../tmp/evil",
        "backend=[triton,/tmp/evil]",
        "output=${oc.env:HOME}",
        "hydra.job.env_set.LD_PRELOAD=/tmp/evil.so",
    ],
)
def test_the_run_of_a_stranger_brings_no_code(key: str, word: str, folder: Path, mark: Path, refusal: Refusal) -> None:
    run = _run_of_a_stranger(folder, [word])
    assert "which can run code; expected a run of your own" in refusal(f"{key}={run}")
    assert not mark.exists()


def test_the_run_of_a_stranger_brings_no_options(folder: Path, mark: Path, refusal: Refusal) -> None:
    code = folder / "code" / "backend"
    code.mkdir(parents=True)
    (code / "own.yaml").write_text("own:\n  _target_: their_backend.Own\n")
    (folder / "code" / "their_backend.py").write_text(f"open({str(mark)!r}, 'w')\n")
    run = _run_of_a_stranger(folder, ["backend=[own]"], config_dir=str(folder / "code"))
    assert "whose code would be run; type it too" in refusal(f"reuse={run}")
    assert not mark.exists()


def test_a_bomb_of_aliases_in_a_run_is_no_list_of_words(folder: Path, refusal: Refusal) -> None:
    run = _run_of_a_stranger(folder, [])
    levels = "".join(f"- &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 9))
    (run / ".hydra" / "overrides.yaml").write_text(f"- &l0 [x]\n{levels}")
    assert "does not say what was typed" in refusal(f"reuse={run}")


TABLE = "gfx,cu_num,M,N,K,libtype,us,kernelName,config\n"


@pytest.mark.parametrize(
    "knobs",
    [
        {"BLOCK_SIZE_K": 0},
        {"BLOCK_SIZE_M": -16},
        {"BLOCK_SIZE_M": 2**62},
        {"BLOCK_SIZE_M": "16; import os"},
        {"BLOCK_SIZE_M": 1e300},
        {"num_warps": 10**30},
        {"cache_modifier": '"); import os; ("'},
        {"__class__": 1},
    ],
)
def test_knobs_of_a_stranger_are_compiled_only_where_they_fit(
    knobs: dict[str, object], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "num_warps": 4, "num_stages": 2}
    rest = {"GROUP_SIZE_M": 1, "NUM_KSPLIT": 1, "cache_modifier": ""}
    config = json.dumps(good | rest | knobs).replace('"', '""')
    (folder / "bf16_tuned_gemm.csv").write_text(f'{TABLE}sm_90,132,16,256,256,triton,5,product,"{config}"\n')
    code = main(["prebuild", "table=bf16_tuned_gemm.csv"])
    out, error = capfd.readouterr()
    assert "internal error" not in error
    assert (code, "stale: " in out or "expected the knobs as a JSON object" in error) in ((1, True), (2, True))
    assert "compiled in" not in out


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ('sm_90,132,1,2,3,torch,5,x,"{""a"":NaN}"', "expected the knobs as a JSON object"),
        ('sm_90,132,1,2,3,torch,5,x,"{""a"":{""b"":1}}"', "expected the knobs as a JSON object"),
        ('sm_90,132,1,2,3,torch,5,x,"' + "[" * 100_000 + '"', "config"),
        ("sm_90,132,1,2,3,torch,5,x," + "y" * 200_000, "field larger than field limit"),
        ("sm_90,132," + "9" * 400 + ",2,3,torch,5,x,{}", "column M"),
        ("sm_90,132,1,2,3,torch,1e999,x,{}", "column us: '1e999'"),
        ('sm_90,132,1,2,3,torch,5,"x\ny",{}', "a quote that is not closed in its line"),
    ],
)
def test_cells_of_a_stranger(cells: str, said: str, folder: Path, refusal: Refusal) -> None:
    (folder / "bf16_tuned_gemm.csv").write_text(f"{TABLE}{cells}\n")
    assert said in refusal("merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv")
    assert not (folder / "c.csv").exists()


def test_a_table_cannot_command_the_terminal(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    row = "sm_90,132,1,2,3,\x1b]0;pwned\x07,{us},\x1b[2J\x9b31m,{{}}\n"
    (folder / "bf16_tuned_gemm.csv").write_text(TABLE + row.format(us=5) + row.format(us=6))
    assert main(["merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv"]) == 0
    out, error = capfd.readouterr()
    for text in (out, error, (folder / "c.csv.merge.txt").read_text()):
        assert all(c.isprintable() or c == "\n" for c in text)
    terminal = Terminal(verbose=True)
    for kind in ("line", "warning", "detail"):
        terminal(Event(kind=kind, text="a\x1b[2Jb\r\nc"))
    assert "\x1b" not in "".join(capfd.readouterr())


def test_links_of_a_stranger_are_not_written_through(folder: Path) -> None:
    """A repository can hold links under the names that a run writes."""
    (folder / "precious").write_text("mine")
    (folder / "bf16_tuned_gemm.csv").write_text(TABLE + "sm_90,132,1,2,3,torch,5,x,{}\n")
    for name in ("c.csv.merge.txt", "c.csv.meta.json", ".c.csv.lock"):
        os.symlink("precious", folder / name)
    main(["merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv"])
    assert (folder / "precious").read_text() == "mine"


def test_a_journal_that_is_a_link_is_not_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run_of_a_stranger(folder, ["kernel=a16w16"])
    (run / "trials.jsonl").rename(folder / "precious")
    (run / "trials.jsonl").symlink_to(folder / "precious")
    before = (folder / "precious").read_text()
    assert main([f"resume={run}"]) == 3
    assert "trials.jsonl: cannot write the journal" in capsys.readouterr().err
    assert (folder / "precious").read_text() == before


def test_the_lock_of_captured_products_is_not_written_through(folder: Path) -> None:
    (folder / "precious").write_text("mine")
    (folder / ".c.csv.lock").symlink_to("precious")
    recorder = Recorder(path=folder / "c.csv")
    recorder.add("a16w16", {"M": 1, "N": 2, "K": 3}, "")
    recorder.flush()
    assert (folder / "precious").read_text() == "mine"


def test_endless_files_are_refused(folder: Path, refusal: Refusal) -> None:
    assert "no regular file" in refusal("capture", "shapes=csv", "shapes.path=/dev/zero")
    os.mkfifo(folder / "pipe.json")
    assert "pipe.json: no regular file" in refusal("capture", "shapes=model", f"shapes.path={folder / 'pipe.json'}")


_REAL = (
    b"gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,config,_tag\n"
    b'sm_90,132,1,2,3,False,torch.bfloat16,torch.bfloat16,False,False,triton,0,4,9.5,p@6a0,0.5%,"{""a"":1}",x\n'
    b"gfx942,304,1,2,3,TRUE,bf16,torch.float32,0,,asm,5,13,7.9,_ZN,0.0,,\n"
)


_EDIT = st.tuples(st.integers(0, len(_REAL)), st.integers(0, 8), st.binary(max_size=6))


@given(st.lists(_EDIT, min_size=1, max_size=6))
@settings(max_examples=400)
def test_a_table_of_any_bytes_is_read_whole_or_refused_in_a_line(
    folder: Path, edits: list[tuple[int, int, bytes]]
) -> None:
    raw = _REAL
    for place, cut, text in edits:
        raw = raw[:place] + text + raw[place + cut :]
    path, family = folder / "t.csv", load_family("a16w16")
    path.write_bytes(raw)
    try:
        entries = entries_of(path, family, open_sheet(path, family), {})
    except UserError:
        return
    union = unite(entries, family, Judge(device=None, changed=lambda row: False))
    extra = sorted({name for entry in union.entries for name in entry.extra})
    path.write_text(render([{**e.row, **e.extra} for e in union.entries], family, extra), newline="")
    again = open_sheet(path, family)
    assert [row.get("us") for row in again.rows] == [entry.row.get("us") for entry in union.entries]


def test_the_journal_of_a_stranger_names_no_file_and_no_device(folder: Path, refusal: Refusal) -> None:
    device = {"kind": "cuda", "index": 0, "name": "x", "gfx": "../../../tmp/x", "cu_num": 132}
    device |= {"shared_bytes": 0, "cache_bytes": 0, "warp_size": 32}
    problem = {"id": "a16w16 M=x", "key": {"M": "x"}, "weight": 1, "layer": ""}
    run = _run_of_a_stranger(folder, ["kernel=a16w16"])
    trial = {"stage": "bench", "problem": problem["id"], "candidate": "c", "status": "ok", "launches": 1}
    rows = [{"row": "session", "device": device}, {"row": "problem", **problem}]
    rows += [{"row": "candidate", "id": "c", "backend": "triton", "knobs": {}}]
    rows += [{"row": "trial", **trial, "samples_us": [1.0], "err_ratio": 0.0}]
    (run / "trials.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = (f"reuse={run}", "chain=[select,merge]")
    assert "no row of its journal tells the device" in refusal(*asked)
    rows[0]["device"] = device | {"gfx": "sm_90"}
    (run / "trials.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert "problem 'a16w16 M=x' has no key of kernel=a16w16" in refusal(*asked)
    assert not list(folder.glob("outputs/tuned/*"))
