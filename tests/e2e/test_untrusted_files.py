"""Untrusted files: attempts to run code, write elsewhere, take over a terminal or never end."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import few

from gemmpipe.cli.main import main
from gemmpipe.cli.progress import Terminal
from gemmpipe.cli.runs import find_run
from gemmpipe.core.errors import UserError
from gemmpipe.core.events import Event
from gemmpipe.family import load_family
from gemmpipe.pipeline.plan import Plan
from gemmpipe.runtime.capture.recorder import Recorder
from gemmpipe.tables.merge import RowPreference
from gemmpipe.tables.store import parse_table, render
from gemmpipe.tables.unite import entries_of, unite_tables

Refusal = Callable[..., str]
AXES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "NUM_KSPLIT", "num_warps", "num_stages")
CALLBACK = "# @package hydra.callbacks\nx:\n  _target_: builtins.open\n  file: {mark}\n  mode: w\n"
"""An option that Hydra composes among its callbacks, and instantiates before any configuration is built."""


@pytest.fixture
def mark(folder: Path) -> Path:
    """The file that injected code would write."""
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


@pytest.mark.timeout(120)  # some of them would take for ever
@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("resume: evil", "resume: resumes a run with the overrides in its folder"),
        ("reuse: evil", "reuse: reads another run"),
        ("executor: ray\nexecutor.address: ray://evil:1", "executor.address: connects to a cluster"),
        ("executor: {address: 'ray://evil:1'}", "executor.address: connects to a cluster"),
        ("search/../hydra/callbacks: x", "not for a recipe"),
        ("a..b: x", "not for a recipe"),
        ("pipeline: ../../evil", "no such pipeline"),
        ("output: /etc/gemmpipe", "output: '/etc/gemmpipe' is outside the current directory; expected a path in it"),
        ("output: ../elsewhere", "is outside the current directory"),
        ("output: ~/elsewhere", "is outside the current directory"),
        ("output: away/x", "is outside the current directory"),
        ('output: "a\\0b"', "is outside the current directory"),
        ("profile: /tmp/x.csv", "profile: '/tmp/x.csv' is outside the current directory"),
        ("format.csv.file: /tmp/x.csv", "format.csv.file: '/tmp/x.csv' is outside the current directory"),
        ("format: {csv: {file: ../x.csv}}", "format.csv.file: '../x.csv' is outside the current directory"),
        ("sweep: {output: [a, ../b]}", "output: '../b' is outside the current directory"),
        ("shapes: csv\nshapes.path: x\nbatch: 1e400", "batch: "),
        ("shapes: {a: " + "{a: " * 40 + "1" + "}" * 40 + "}", "nested more than 32 deep"),
        ("stages.screen.keep: " + "9" * 5000, ""),
        ("batch: 0x" + "F" * 5000, "batch: a whole number of 20,000 bits"),
        ("batch: 1" + ":59" * 500 + ".5", "not readable as YAML"),
        ("batch: !!int ''", "tags such as"),
        ("batch: !!timestamp x", "tags such as"),
        ("batch: !!python/object/apply:os.system [id]", "tags such as"),
        ('shapes.path: "\\ud800"', "is not valid text"),
        ("batch: [" + "[]," * 30_000 + "]", "values; expected a recipe"),
        ("batch: [" + "16, " * 2000 + "16]", "more than 2,000 values"),
        (
            "space: {" + ", ".join(f"{axis}: {[*range(1, 21)]}" for axis in AXES) + "}",
            "points, expected at most 100,000,000",
        ),
        ("executor.compile_workers: 1000000", "executor.compile_workers: 1000000 given, expected at most 4096"),
        ("format.triton_json.device_name: ../../etc/x", "device_name: '../../etc/x', expected a name"),
        ('format.triton_json.device_name: "a\\0b"', "expected a name"),
    ],
    ids=lambda text: text[:40],
)
def test_a_recipe_cannot_write_elsewhere_connect_or_never_end(
    text: str, printed: str, folder: Path, refusal: Refusal, plans: list[Plan]
) -> None:
    (folder / "away").symlink_to("/tmp")
    assert printed in refusal(_recipe(folder, text))
    assert plans == []


@pytest.mark.timeout(120)  # some 90,000 squared steps within a regular expression would take longer
def test_a_recipe_of_backslashes_takes_no_longer_than_another(folder: Path, plans: list[Plan]) -> None:
    assert main([_recipe(folder, "kernel: a16w16\nprofile: '" + "\\" * 90_000 + "'")]) == 0
    assert plans[0].profile == "\\" * 90_000


def test_what_a_recipe_may_not_name_the_command_line_may(folder: Path, plans: list[Plan]) -> None:
    elsewhere = folder.parent / "elsewhere"
    assert main([_recipe(folder, "output: here/below"), f"profile={elsewhere}/x.csv"]) == 0
    assert main([_recipe(folder, "kernel: a16w16"), f"output={elsewhere}"]) == 0
    assert [plan.output for plan in plans] == ["here/below", str(elsewhere)]


@pytest.mark.parametrize("where", few(["", "output: out\n", "sweep: {output: [out, out2]}\n"], 1))
def test_a_recipe_names_no_file_behind_a_link_of_its_repository(
    where: str, folder: Path, capsys: pytest.CaptureFixture[str], plans: list[Plan]
) -> None:
    """The path from here is harmless; the one from the output folder, which the whole command line tells, is not."""
    for output in ("out", "out2", "outputs/tuned"):
        (folder / output).mkdir(parents=True)
        (folder / output / "link").symlink_to("/tmp")
    recipe = _recipe(folder, f"{where}format: [csv]\nformat.csv: {{file: link/x.csv}}")
    assert main([recipe]) == 2
    assert "link/x.csv is outside the current directory; expected a path in it" in capsys.readouterr().err
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
    assert "can run code; expected a run of your own" in refusal(f"{key}={run}")
    assert not mark.exists()


def test_the_run_of_a_stranger_brings_no_options(folder: Path, mark: Path, refusal: Refusal) -> None:
    code = folder / "code" / "backend"
    code.mkdir(parents=True)
    (code / "own.yaml").write_text("own:\n  _target_: their_backend.Own\n")
    (folder / "code" / "their_backend.py").write_text(f"open({str(mark)!r}, 'w')\n")
    run = _run_of_a_stranger(folder, ["backend=[own]"], config_dir=str(folder / "code"))
    assert "has code that would run; pass --config-dir too" in refusal(f"reuse={run}")
    assert not mark.exists()


def test_a_bomb_of_aliases_in_a_run_is_no_list_of_words(folder: Path, refusal: Refusal) -> None:
    run = _run_of_a_stranger(folder, [])
    levels = "".join(f"- &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 9))
    (run / ".hydra" / "overrides.yaml").write_text(f"- &l0 [x]\n{levels}")
    assert "does not have the run's command line" in refusal(f"reuse={run}")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SPOILT: dict[str, Callable[[Path], object]] = {
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "half a character": lambda path: path.write_bytes(b"- kernel=\xc3"),
    "20,000 brackets": lambda path: path.write_text("[" * 20_000),
    "brackets in a word": lambda path: path.write_text(f"- batch={'[' * 20_000}"),
    "closed brackets": lambda path: path.write_text("[" * 20_000 + "]" * 20_000),
    "deep blocks": lambda path: path.write_text("- " * 20_000),
    "a date that is none": lambda path: path.write_text("- 2026-13-45"),
    "a number of YAML's": lambda path: path.write_text("- !!int x"),
    "a tag": lambda path: path.write_text("- !!python/object/apply:os.system [id]"),
    "keys": lambda path: path.write_text("hydra: {job: [x], runtime: 3}"),
    "a folder for a list": lambda path: path.write_text(
        "hydra: {job: {config_name: tune}, runtime: {config_sources: [{provider: command-line, path: [1]}]}}"
    ),
    "empty": lambda path: path.write_text(""),
    "a pipe": _fifo,
    "endless": lambda path: os.truncate(path, 6_000_000_000),
    "a link without an end": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.mark.parametrize("name", ["overrides.yaml", "hydra.yaml"])
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_the_words_of_a_stranger_s_run_are_read_or_refused_in_a_line(
    spoil: Callable[[Path], object], name: str, folder: Path, refusal: Refusal
) -> None:
    run = _run_of_a_stranger(folder, ["kernel=a16w16"])
    spoil(run / ".hydra" / name)
    printed = refusal(f"resume={run}")
    assert "its .hydra folder does not have the run's command line" in printed or "nested more than 32 deep" in printed


@given(raw=st.binary(max_size=80), name=st.sampled_from(["overrides.yaml", "hydra.yaml"]))
def test_any_bytes_in_the_folder_of_a_run_are_a_line(raw: bytes, name: str, folder: Path) -> None:
    run = _run_of_a_stranger(folder, ["kernel=a16w16"])
    (run / ".hydra" / name).write_bytes(raw)
    with suppress(UserError):
        assert all(isinstance(word, str) for word in find_run("resume", str(run), None, False).overrides)


def test_the_home_of_nobody_is_no_folder_of_a_run(refusal: Refusal) -> None:
    assert "resume=~nosuchuser/run: no such home directory" in refusal("resume=~nosuchuser/run")


def test_a_journal_or_a_manifest_that_is_a_pipe_is_no_run(folder: Path, refusal: Refusal) -> None:
    run = folder / "outputs" / "runs" / "tune" / "x"
    run.mkdir(parents=True)
    os.mkfifo(run / "trials.jsonl")
    assert "no run that can be resumed" in refusal("resume=last")
    (run / "trials.jsonl").unlink()
    (run / "trials.jsonl").write_text('{"row":"session"}\n')
    os.mkfifo(run / "manifest.json")
    assert "no run that can be resumed" in refusal("resume=last")
    (run / "manifest.json").unlink()
    (run / "manifest.json").write_text("[" * 20_000)
    assert "no run that can be resumed" in refusal("resume=last")


ODD_CHOICES = {
    "device": ("[[1,2]]", "[16,-16]", "[{a: 1}]", "[null]", "[1.5]"),
    "kernel": ("[[1,2]]", "[a16w16,[a8w8]]", "[true]"),
    "shapes": ("[{a: 1}]", "[1]"),
    "backend": ("[[triton]]", "[triton,3]", "[{triton: 1}]"),
    "timer@stages.bench.timer": ("[[1]]",),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ODD_CHOICES.items() for value in values])
def test_what_can_name_no_option_is_refused_before_anything_is_composed(
    key: str, value: str, folder: Path, refusal: Refusal, plans: list[Plan]
) -> None:
    printed = f"{key.split('@')[0]}: "
    for arguments in ((f"{key}={value}",), (f"+{key}={value}",), ("-m", f"{key}={value},cpu")):
        line = refusal(*arguments)
        assert line.startswith(printed)
        assert "expected the name of an option, or a list of names; known: " in line
    recipe = _recipe(folder, f"{key}: {value}")
    assert refusal(recipe).startswith(f"{recipe}: {printed}")
    recipe = _recipe(folder, f"sweep: {{'{key}': [{value}]}}")
    assert refusal(recipe).startswith(f"{recipe}: {printed}")
    assert plans == []


@pytest.mark.parametrize("key", ["hydra/launcher", "hydra/job_logging"])
def test_hydras_own_options_are_named_too(key: str, refusal: Refusal) -> None:
    assert refusal(f"{key}=[[1,2]]").startswith(f"{key}: [[1,2]] given, expected the name of an option")
    assert refusal("~kernel=[1]").startswith("kernel: [1] given, expected the name")


@pytest.mark.parametrize("text", ["[" * 2000, "[" * 2000 + "]" * 2000, "{a: " * 2000, "'" + "[" * 2000 + "'"])
def test_thousands_of_brackets_are_refused_before_they_are_parsed(
    text: str, folder: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(*arguments: object, **named: object) -> object:
        raise AssertionError("parsed")

    monkeypatch.setattr("gemmpipe.cli.overrides.OverridesParser.create", parsed)
    printed = refusal(_recipe(folder, f"batch: {text}"))
    if text.startswith("'"):  # text for YAML, and a word of the command line then
        assert printed.endswith("r.yaml: batch: nested more than 32 deep; expected key=value")
    else:
        assert printed.endswith("r.yaml: line 2: nested more than 32 deep; expected a recipe")
    for key in ("batch", "kernel", "shapes.items"):
        assert refusal(f"{key}={text}") == f"{key}: nested more than 32 deep; expected key=value"


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
    ("cells", "printed"),
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
def test_cells_of_a_stranger(cells: str, printed: str, folder: Path, refusal: Refusal) -> None:
    (folder / "bf16_tuned_gemm.csv").write_text(f"{TABLE}{cells}\n")
    assert printed in refusal("merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv")
    assert not (folder / "c.csv").exists()


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "x",
        '{""a"":NaN}',
        '{""a"":1' + "0" * 400 + "}",
        '{""a"":""b""}',
        '{""a"":-1}',
        '{""a"":true}',
        '{""a"":{}}',
    ],
)
def test_ratios_of_a_stranger(text: str, folder: Path, refusal: Refusal) -> None:
    header = TABLE.replace("config", "config,backend_ratios")
    (folder / "bf16_tuned_gemm.csv").write_text(f'{header}sm_90,132,1,2,3,torch,5,x,{{}},"{text}"\n')
    assert "column backend_ratios" in refusal("merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv")


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
    assert "not a regular file" in refusal("capture", "shapes=csv", "shapes.path=/dev/zero")
    os.mkfifo(folder / "pipe.json")
    assert "pipe.json: not a regular file" in refusal("capture", "shapes=model", f"shapes.path={folder / 'pipe.json'}")


_PIPES = {
    "merge inputs": ("bf16_tuned_gemm.csv", ("merge", "inputs={}")),
    "merge a folder": ("bf16_tuned_gemm.csv", ("merge", "inputs=*.csv")),
    "verify": ("bf16_tuned_gemm.csv", ("verify", "table={}", "device=cpu")),
    "prebuild": ("bf16_tuned_gemm.csv", ("prebuild", "table={}")),
    "shapes=csv": ("x.csv", ("capture", "shapes=csv", "shapes.path={}")),
    "shapes=trace": ("x.json.gz", ("capture", "shapes=trace", "shapes.path={}")),
    "shapes=log": ("x.log", ("capture", "shapes=log", "shapes.path={}")),
    "shapes=tunableop": ("x.csv", ("capture", "shapes=tunableop", "shapes.path={}")),
    "shapes=model": ("config.json", ("capture", "shapes=model", "shapes.path=.")),
    "recipe": ("r.yaml", ("{}",)),
    "recording": ("h200_a16w16.csv", ("replay", "search.recorded={}")),
}


@pytest.mark.parametrize("reader", few([*_PIPES], 0, 4, 5, 8, 9))
def test_a_pipe_is_refused_by_every_reader_before_it_is_opened(reader: str, folder: Path, refusal: Refusal) -> None:
    name, arguments = _PIPES[reader]
    os.mkfifo(folder / name)
    assert "not a regular file" in refusal(*(word.format(name) for word in arguments))


@pytest.mark.parametrize("name", ["trials.jsonl", ".hydra/overrides.yaml", ".hydra/hydra.yaml"])
def test_a_run_with_a_pipe_in_it_is_refused(name: str, folder: Path, refusal: Refusal) -> None:
    run = _run_of_a_stranger(folder, ["kernel=a16w16"])
    (run / name).unlink()
    os.mkfifo(run / name)
    assert f"resume={run}" in refusal(f"resume={run}")


def test_a_pipe_among_the_tables_of_an_engine_costs_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(folder / "pipe.csv")
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", str(folder / "pipe.csv"))
    assert main(["doctor", "kernel=a16w16", "device=cpu", "shapes=list", "shapes.items=[[1,64,64]]"]) == 0
    assert "pipe.csv: not found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("column", "cell", "printed"),
    few(
        [
            ("us", "5%", "expected a number"),
            ("us", "1_0.5", "expected a number"),
            ("us", "\uff15", "expected a number"),
            ("us", "-5", "expected microseconds above 0, or -1, 0, inf, nan or nothing"),
            ("err_ratio", "-0.5", "expected a fraction from 0 to 1"),
            ("err_ratio", "7", "expected a fraction from 0 to 1"),
            ("err_ratio", "101%", "expected a fraction from 0 to 1"),
            ("tflops", "-1", "expected a number from 0"),
            ("bw", "-0.1", "expected a number from 0"),
            ("splitK", "-5", "expected a whole number from 0 to 65536"),
            ("solidx", "9" * 60, "expected a whole number from -9223372036854775808 to 9223372036854775807"),
            ("solidx", "\u0663", "expected a whole number"),
            ("kernelName", "=cmd|' /C calc'!A0", "expected a name: spreadsheets take it for a formula"),
            ("libtype", "@SUM(A1)", "expected a name: spreadsheets take it for a formula"),
            ("policy", "x" * 100 + "\x00" + "y" * 1000 + "=", ""),
        ],
        0,
        3,
        5,
        9,
        12,
        14,
    ),
)
def test_a_cell_is_what_its_column_holds_or_the_row_is_named(
    column: str, cell: str, printed: str, folder: Path, refusal: Refusal
) -> None:
    header = "gfx,cu_num,M,N,K,libtype,us,kernelName,err_ratio,tflops,bw,splitK,solidx,policy"
    cells = ("sm_90", "132", "1", "2", "3", "torch", "5", "x", "0", "0", "0", "1", "0", "p")
    row = dict(zip(header.split(","), cells, strict=True)) | {column: cell}
    (folder / "bf16_tuned_gemm.csv").write_text(f"{header}\n{','.join(row.values())}\n")
    asked = ("merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv")
    if printed:
        assert f"bf16_tuned_gemm.csv:2: column {column}: " in (line := refusal(*asked))
        assert printed in line
    else:
        assert main(list(asked)) == 0


@pytest.mark.parametrize("us", ["", "-1", "0", "inf", "INF"])
def test_what_tuners_write_for_no_time_is_no_time(us: str, folder: Path) -> None:
    rows = "".join(f"sm_90,132,1,2,3,torch,{each},x,{{}}\n" for each in (us, "5"))
    (folder / "bf16_tuned_gemm.csv").write_text(TABLE + rows)
    assert main(["merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv"]) == 0
    assert [row["us"] for row in parse_table(folder / "c.csv", load_family("a16w16")).rows] == [5.0]
    assert "without a time" in (folder / "c.csv.merge.txt").read_text()


def test_a_comment_that_is_a_formula_is_not_carried_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    header, row = TABLE.strip(), "sm_90,132,{m},2,3,torch,5,x,{{}}"
    lines = [f"{row.format(m=m)},{note}" for m, note in enumerate(("=1+x", "-fine", "-0.5", "--", "fine"), 1)]
    (folder / "bf16_tuned_gemm.csv").write_text("\n".join([f"{header},note", *lines, ""]))
    assert main(["merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv"]) == 0
    assert "cells left out, as spreadsheets read them as formulas: note" in capfd.readouterr().out
    notes = [row["note"] for row in parse_table(folder / "c.csv", load_family("a16w16")).rows]
    assert notes == [None, None, "-0.5", "--", "fine"]


def test_a_refusal_is_bounded_whatever_it_quotes(folder: Path, refusal: Refusal) -> None:
    for cells in ("sm_90,132,1,2,3,torch," + "9" * 90_000 + ",x,{}", "sm_90,132,1,2,3,torch,5,x," + "{" * 90_000):
        (folder / "bf16_tuned_gemm.csv").write_text(f"{TABLE}{cells}\n")
        assert len(refusal("merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv")) <= 520
    (folder / "bf16_tuned_gemm.csv").write_text(f"{'y' * 90_000},M\n")
    assert len(refusal("merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv")) <= 520


def test_results_of_tunableop_that_are_no_text_are_refused_at_once(folder: Path, refusal: Refusal) -> None:
    with (folder / "bf16_tuned_gemm.csv").open("wb") as stream:
        stream.write(b"Validator,PT_VERSION,2.13.0\n")
        stream.truncate(6 << 30)
    assert "larger than 1,000,000,000 bytes" in refusal(
        "merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv", "target=sm_90"
    )
    os.truncate(folder / "bf16_tuned_gemm.csv", 900 << 20)
    assert "a line of over 1,000,000 characters" in refusal(
        "merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv", "target=sm_90"
    )


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
        entries = entries_of(path, family, parse_table(path, family), {})
    except UserError:
        return
    union = unite_tables(entries, family, RowPreference(device=None, is_stale=lambda row: False))
    extra = sorted({name for entry in union.entries for name in entry.extra})
    path.write_text(render([{**e.row, **e.extra} for e in union.entries], family, extra), newline="")
    again = parse_table(path, family)
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
    assert "no journal row names the device" in refusal(*asked)
    rows[0]["device"] = device | {"gfx": "sm_90"}
    (run / "trials.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert "problem 'a16w16 M=x' has no key of kernel=a16w16" in refusal(*asked)
    assert not list(folder.glob("outputs/tuned/*"))
