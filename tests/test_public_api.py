"""The public names and signatures, as tests/data/public_api.txt has them, and runs from Python.

After a change that is meant: `python tests/test_public_api.py > tests/data/public_api.txt`.
"""

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from forked_programs import Forking

import gemmpipe
from gemmpipe.cli.main import main
from gemmpipe.core.signals import Interrupted

MODULES = ("gemmpipe", "gemmpipe.runtime", "gemmpipe.tune", "gemmpipe.ext")
SNAPSHOT = Path(__file__).parent / "data" / "public_api.txt"
TINY = {
    "kernel": "a16w16",
    "shapes": "list",
    "device": "cpu",
    "backend": ["torch"],
    "output": "tuned",
    "format": ["csv"],
}
ITEMS = {"shapes.items": [{"M": [1, 4], "N": 64, "K": 64}]}


def _lines() -> Iterator[str]:
    for place in MODULES:
        module = importlib.import_module(place)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            yield f"{place}.{name}{_signature(value)}"
            if inspect.isclass(value):
                yield from (f"    {member}" for member in _members(value))
        yield ""


def _signature(value: object) -> str:
    if inspect.isclass(value) and issubclass(value, enum.Enum | Exception):
        return ""
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return ""
    parameters = inspect.signature(value).parameters.values()
    shown = [p.replace(annotation=p.empty) for p in parameters if p.name != "self"]
    shown = [p.replace(default=...) if " at 0x" in repr(p.default) else p for p in shown]
    return str(inspect.Signature(shown))


def _members(cls: type) -> Iterator[str]:
    """Members of the class itself: fields are in its signature; old names are not shown."""
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for name, member in sorted(vars(cls).items()):
        if name.startswith("_") or name in fields or inspect.getdoc(member) == "" or _is_old(cls, name):
            continue
        function = getattr(member, "__func__", member)
        yield f"{name}{_signature(function)}" if inspect.isfunction(function) else name


def _is_old(cls: type, name: str) -> bool:
    """True for a second name of a member."""
    member = vars(cls)[name]
    read = getattr(member, "fget", None)
    if getattr(read, "__qualname__", "").startswith("_old_member"):
        return True
    if read is not None and read.__name__ != name:
        return True
    if isinstance(member, enum.Enum):
        return member.name != name
    return inspect.isfunction(member) and member.__name__ != name


def test_the_public_names_are_those_of_the_snapshot() -> None:
    assert list(_lines()) == SNAPSHOT.read_text().splitlines()


def test_every_public_name_is_documented() -> None:
    for place in MODULES:
        module = importlib.import_module(place)
        assert module.__doc__
        values = [getattr(module, name) for name in module.__all__]
        for value in values:
            if inspect.isclass(value) or inspect.isfunction(value):
                assert value.__doc__, value


def test_what_extenders_need_is_in_one_group_each() -> None:
    from gemmpipe import ext

    groups = (ext.VALUES, ext.ERRORS, ext.FAMILIES, ext.BACKENDS, ext.SOURCES, ext.SEARCHES, ext.FORMATS)
    names = [name for group in (*groups, ext.EXECUTORS, ext.STAGES) for name in group]
    assert sorted(names) == sorted(ext.__all__)


@pytest.mark.usefixtures("own_locks")
def test_a_run_and_its_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = gemmpipe.run("tune", ["timer@stages.bench.timer=quick"], search={"trial_fraction": 0.5}, **TINY, **ITEMS)
    assert (result.exit_code, result.pipeline, result.unsolved) == (0, "tune", ())
    assert result.artifacts == (folder / "tuned" / "bf16_tuned_gemm.csv",)
    assert result.artifacts[0].is_file()
    assert result.folder.parent == folder / "outputs" / "runs" / "tune"
    best = result.table[result.table["format"] == ""]
    assert best[["M", "N", "K"]].to_numpy().tolist() == [[1, 64, 64], [4, 64, 64]]
    assert (best["us"] > 0).all()
    assert set(result.read("trials")["status"]) <= {"ok", "pruned", "unsupported"}
    with pytest.raises(gemmpipe.UserError, match="no table 'trails'; did you mean 'trials'"):
        result.read("trails")
    with pytest.raises(gemmpipe.UserError, match="before the run is finished: gemmpipe resume="):
        replace(result, exit_code=130).read("called")
    assert "screen: 2 problems" in capsys.readouterr().out
    assert gemmpipe.load() == gemmpipe.load(result.folder) == result
    again = gemmpipe.run("tune", **TINY, **ITEMS)
    assert again.exit_code == 0
    assert again.table[["M", "us"]].to_numpy().tolist() == best[["M", "us"]].to_numpy().tolist(), "those of the table"
    assert gemmpipe.load("last") == result, "the one that timed them, as in show and report"
    nothing = "nothing was timed there, all 2 problems were tuned already; expected the run that timed them"
    for read in (again.report, lambda: again.products, lambda: result.diff(again)):
        with pytest.raises(gemmpipe.UserError, match=nothing) as raised:
            read()
        assert f"({result.folder.relative_to(folder)})" in str(raised.value)
        assert "or their table (tuned/bf16_tuned_gemm.csv)" in str(raised.value)
    assert main(["tune", "resume=last"]) == 0, "the command line goes on with it"


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({"kernel": "a16w17"}, "kernel: no option 'a16w17'; did you mean 'a16w16'?"),
        ({"search": {"shar": 1}}, r"search\.shar: no such key"),
        ({"batch": 0}, "batch: 0 given, expected at least 1"),
        ({"resume": "nowhere"}, "resume=nowhere: no such folder"),
        ({"output": object()}, "output: object given, expected text, a number, a list, a mapping or None"),
        ({"pipeline": "tun"}, "tun: no such pipeline; did you mean 'tune'?"),
        ({"pipeline": "doctor"}, "doctor: makes no run"),
        ({"pipeline": 5}, "pipeline: 5 given; expected a name such as 'tune', or a recipe's path"),
        ({"overrides": "shapes.tp=4"}, r"overrides: 'shapes.tp=4' given; expected a list such as \['shapes.tp=4'\]"),
        ({"overrides": 5}, "overrides: 5 given; expected a list"),
        ({"overrides": ["shapes=list", 3]}, "overrides: 3 given; expected texts such as 'shapes.tp=4'"),
        ({"overrides": ["--multirun"]}, "--multirun: expected key=value"),
        ({"overrides": ["search=random,gaussian"]}, "several values need -m"),
    ],
)
def test_errors_are_raised(options: dict[str, object], printed: str, folder: Path) -> None:
    with pytest.raises(gemmpipe.UserError, match=printed):
        gemmpipe.run(**options)  # type: ignore[arg-type]
    assert not (folder / "outputs").exists()


def test_how_a_run_ends_otherwise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ending(error: BaseException) -> None:
        def run(plan: object, events: object) -> int:
            raise error

        monkeypatch.setattr("gemmpipe.pipeline.runner.run", run)

    ending(gemmpipe.EnvironmentProblem("no space"))
    with pytest.raises(gemmpipe.EnvironmentProblem, match="no space"):
        gemmpipe.run(**TINY, **ITEMS)  # type: ignore[arg-type]
    ending(OSError(28, "No space left on device", "tuned"))
    with pytest.raises(gemmpipe.EnvironmentProblem, match="tuned: No space left on device"):
        gemmpipe.run(**TINY, **ITEMS)  # type: ignore[arg-type]
    ending(ZeroDivisionError("x"))
    with pytest.raises(gemmpipe.GemmpipeError, match="internal error: ZeroDivisionError: x") as caught:
        gemmpipe.run(**TINY, **ITEMS)  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    monkeypatch.setattr("gemmpipe.pipeline.runner.run", lambda plan, events: Interrupted.exit_code)
    with pytest.raises(KeyboardInterrupt):
        gemmpipe.run(**TINY, **ITEMS)  # type: ignore[arg-type]
    assert not list((folder / "outputs" / "runs" / "tune").glob("*/trials.jsonl"))


def test_nothing_to_load(folder: Path) -> None:
    with pytest.raises(gemmpipe.UserError, match="load: last: no finished run under outputs/runs"):
        gemmpipe.load()
    with pytest.raises(gemmpipe.UserError, match="load: no folder nowhere"):
        gemmpipe.load("nowhere")
    for other in (5, None, ["last"]):
        with pytest.raises(gemmpipe.UserError, match=r"load: .* given; expected a path, or 'last'"):
            gemmpipe.load(other)  # type: ignore[arg-type]
    (folder / "a.csv").touch()
    with pytest.raises(gemmpipe.UserError, match=r"load: .*a\.csv: a file; expected the folder of a run"):
        gemmpipe.load(folder / "a.csv")
    with pytest.raises(gemmpipe.UserError, match=r"no manifest\.json; expected a finished run"):
        gemmpipe.load(folder)
    (folder / "manifest.json").write_text('{"pipeline": "tune"}')
    with pytest.raises(gemmpipe.UserError, match="not a run's manifest"):
        gemmpipe.load(folder)


@pytest.mark.slow
def test_a_script_needs_no_guard(folder: Path, forked_programs: Forking) -> None:
    """Workers do not import the program that runs them, whose Hydra and arguments stay what they were."""
    (folder / "script.py").write_text(
        "import sys\nimport gemmpipe\n"
        f"result = gemmpipe.run('tune', **{TINY!r}, **{ITEMS!r})\n"
        "print('ended', result.exit_code, sys.argv, sys.modules['__main__'].__file__.endswith('script.py'))\n"
    )
    environment = {"TMPDIR": str(folder), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = forked_programs.run(folder, environment, "script.py", ["-m"])
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("ended")] == [
        "ended 0 ['script.py', '-m'] True"
    ]


if __name__ == "__main__":
    print(*_lines(), sep="\n")
