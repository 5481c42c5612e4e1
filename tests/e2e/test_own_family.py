"""The worked example of README and docs/tutorials/own_family.md, word for word: its files, its command, its kernel."""

import csv
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
import triton

from gemmpipe.cli.main import main
from gemmpipe.core.data import Device, Status
from gemmpipe.core.device import arch_device
from gemmpipe.executors.compile_pool import CompilePool
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space
from gemmpipe.launch.build import compile_build
from gemmpipe.sources.inline import InlineShapes
from gemmpipe.stages.screen.candidates import list_by_family_name, list_candidates

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "own_family.md").read_text()
FILES = re.findall(r"^`(mine/[\w/.]+)`:\n\n```\w+\n(.*?)```$", PAGE, re.DOTALL | re.MULTILINE)
(COMMAND,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def mine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield folder / "mine"
    for name in ("relu2", "parts", "parts.relu2"):
        sys.modules.pop(name, None)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_page_shows_every_file_of_its_tree() -> None:
    assert sorted(name for name, _ in FILES) == [
        "mine/backend/eager.yaml",
        "mine/kernel/relu2.yaml",
        "mine/relu2.py",
        "mine/space/relu2.yaml",
    ]
    for name, _ in FILES:
        assert Path(name).name in PAGE.split("```")[1]


@pytest.mark.e2e
@pytest.mark.usefixtures("own_locks")
def test_its_command_tunes(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(COMMAND)
    assert program == "gemmpipe"
    assert main(arguments) == 0
    found = _rows(mine.parent / "tuned" / "relu2_tuned_gemm.csv")
    assert [(row["M"], row["N"], row["K"]) for row in found] == [("1", "512", "1024"), ("64", "512", "1024")]
    (run,) = (mine.parent / "outputs" / "runs" / "tune").iterdir()
    trials = _rows(run / "trials.csv")
    assert {row["status"] for row in trials if row["libtype"] == "eager"} <= {"ok", "pruned"}
    if not torch.cuda.is_available():
        assert {row["libtype"] for row in found} == {"eager"}
        assert {row["error"] for row in trials if row["libtype"] == "triton"} == {"no GPU: Triton compiles for GPUs"}
        return
    fused = [row for row in trials if row["libtype"] == "triton"]
    assert any(row["status"] == "ok" for row in fused)
    assert not [row for row in fused if row["status"] not in ("ok", "pruned", "unsupported")]


def test_a_table_of_it_is_known_by_its_name(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = "gfx,cu_num,M,N,K,dtype,outdtype,libtype,us,config"
    row = "sm_90,132,1,512,1024,torch.bfloat16,torch.bfloat16,eager,5.0,{}"
    (mine.parent / "mine_relu2_tuned_gemm.csv").write_text(f"{header}\n{row}\n")
    (mine / "kernel" / "wide.yaml").write_text((mine / "kernel" / "relu2.yaml").read_text())
    (mine / "kernel" / "broken.yaml").write_text("family: broken\n")
    (mine / "broken.py").write_text("raise RuntimeError('at import')\n")
    arguments = ["--config-dir", str(mine), "merge", "inputs=[mine_relu2_tuned_gemm.csv]", "output=united"]
    assert main(arguments) == 0
    assert _rows(Path("united/relu2_tuned_gemm.csv"))[0]["libtype"] == "eager"
    assert main([*arguments, "kernel=wide", "output=same"]) == 0, "another option of the same family"
    capsys.readouterr()
    assert main([*arguments, "kernel=a16w16"]) == 2
    assert "is by its name a table of relu2; leave kernel= out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("own_locks")
def test_a_family_in_a_package_and_of_another_name(mine: Path) -> None:
    (mine / "parts").mkdir()
    (mine / "parts" / "__init__.py").touch()
    module = (mine / "relu2.py").rename(mine / "parts" / "relu2.py")
    module.write_text(module.read_text().replace('"relu2:', '"parts.relu2:').replace('name="relu2"', 'name="squared"'))
    option = mine / "kernel" / "relu2.yaml"
    option.write_text(option.read_text().replace("family: relu2", "family: parts.relu2"))
    assert main(shlex.split(COMMAND)[1:]) == 0
    assert len(_rows(mine.parent / "tuned" / "relu2_tuned_gemm.csv")) == 2


@pytest.mark.parametrize(
    ("file", "was", "becomes", "printed"),
    [
        (
            "kernel/relu2.yaml",
            "family: relu2",
            "family: relu3",
            "kernel.family: no family 'relu3', and no such module next to",
        ),
        ("space/relu2.yaml", "num_warps", "num_wraps", "space.num_wraps: no knob of this kernel; did you mean"),
        ("backend/eager.yaml", "label", "labl", "backend.eager.labl: no such key; did you mean 'label'?"),
        ("relu2.py", "FAMILY =", "FAMLY =", "kernel.family: relu2 has no FAMILY; did you mean 'FAMLY'?"),
        ("relu2.py", "    baseline", "    basline", "{file}:{made}: TypeError: Family.__init__() got an"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("kernel/relu2.yaml", "family: relu2 ", "", "kernel.family: missing"),
                ("kernel/relu2.yaml", "dtype: null\nout", "dtpe: null\nout", "kernel.dtpe: no such key; did you mean"),
                ("kernel/relu2.yaml", "space: relu2", "space: relu", "kernel/relu2.yaml: space: no option 'relu'; did"),
                ("relu2.py", "FAMILY = Family(", "FAMILY = dict(", "kernel.family: relu2.FAMILY is dict, expected a"),
                ("relu2.py", "import torch\n", "import trch\n", "{file}:{line}: ModuleNotFoundError: No module "),
                ("relu2.py", "import torch\n", "import torch torch\n", "{file}:{line}: SyntaxError: "),
                (
                    "relu2.py",
                    "reject_bias(kernel",
                    "reject_bias(kernl",
                    "{file}:{line}: NameError: name 'kernl' is not",
                ),
            )
        ),
    ],
)
def test_a_mistake_is_a_line_that_says_where(
    file: str, was: str, becomes: str, printed: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (mine / file).read_text()
    assert was in text
    (mine / file).write_text(text.replace(was, becomes))
    assert main([*shlex.split(COMMAND)[1:], "executor.workers=1"]) == 2
    line = capsys.readouterr().err
    lines = {"line": was, "made": "FAMILY = "}
    places = {name: text[: text.find(what)].count("\n") + 1 for name, what in lines.items()}
    assert line.startswith(f"gemmpipe: {printed.format(file=mine / file, **places)}"), line
    assert line.count("\n") == 1


def _broken(mine: Path, was: str, becomes: str) -> str:
    """Change the example's module; where it will raise: the line that says `# here`."""
    text = (mine / "relu2.py").read_text()
    assert text.count(was) == 1
    text = text.replace(was, f"{becomes}  # here")
    (mine / "relu2.py").write_text(text)
    return f"{mine / 'relu2.py'}:{text[: text.index('# here')].count(chr(10)) + 1}"


_FITS = "def unsupported_reason(self, spec, knobs, device):\n        return None"
_OFFERS = 'return ({"in_place": True}, {"in_place": False})'
_COMPUTES = "out.copy_(torch.relu(x @ w_t).square())"
_NORMALISES = "def normalise(self, spec, knobs, device):\n        return"
_SAYS = 'label = "eager"'
_ASKS_FOR_ROWS = """kernel: str = ""

    def configs(self, spec, device, space):
        return space.configs({}, spec.rows)"""


@pytest.mark.e2e
@pytest.mark.usefixtures("own_locks")
@pytest.mark.parametrize(
    ("was", "becomes", "raised"),
    [
        (_FITS, f'{_FITS} if knobs["in_place"] else knobs["quick"]', "KeyError: 'quick'"),
        pytest.param(
            _SAYS,
            f'{_SAYS}\n\n    {_NORMALISES} {{"in_place": knobs["in_place"] or 1 // 0}}',
            "ZeroDivisionError: ",
            marks=pytest.mark.slow,
        ),
        (_COMPUTES, "out.copy_(torch.rule(x @ w_t))", "AttributeError: module 'torch' has no attribute 'rule'"),
        pytest.param(
            _OFFERS,
            'return ({"in_place": True}, {"in_place": False, "out": torch.empty})',
            "",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_candidate_whose_code_raises_is_a_row(
    was: str, becomes: str, raised: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = _broken(mine, was, becomes)
    if not raised:  # no line of the module complains about knobs that are none: the class is named
        place, raised = place.rpartition(":")[0], "TypeError: Object of type builtin_function_or_method is not JSON"
    assert main(shlex.split(COMMAND)[1:]) == 0
    found = _rows(mine.parent / "tuned" / "relu2_tuned_gemm.csv")
    assert {(row["M"], row["libtype"], row["config"]) for row in found} >= {("64", "eager", '{"in_place":true}')}
    (run,) = (mine.parent / "outputs" / "runs" / "tune").iterdir()
    trials = [row for row in _rows(run / "trials.csv") if row["libtype"] == "eager"]
    failed = [row for row in trials if row["config"] != '{"in_place":true}']
    assert [(row["status"], row["samples_us"]) for row in failed] == [("launch_error", "")] * 2
    assert all(row["error"].startswith(place) and raised in row["error"] for row in failed), failed
    warned = [line for line in capsys.readouterr().err.splitlines() if place in line]
    assert [line.split(place)[0] for line in warned] == ["warning: eager: 2 candidates failed: "] * (was != _COMPUTES)


@pytest.mark.e2e
@pytest.mark.usefixtures("own_locks")
@pytest.mark.parametrize(
    ("was", "becomes", "raised"),
    [
        pytest.param(
            'kernel: str = "relu2:relu2_product"',
            _ASKS_FOR_ROWS,
            "AttributeError: 'GemmSpec' object has no attribute 'rows'",
            marks=pytest.mark.slow,
        ),
        (_OFFERS, 'yield from ({"in_place": True}, {"in_place": 1 // 0})', "ZeroDivisionError: "),
    ],
)
def test_who_cannot_name_its_candidates_is_left_out(
    was: str, becomes: str, raised: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, label = _broken(mine, was, becomes), "eager" if was == _OFFERS else "triton"
    solved = label == "triton" or torch.cuda.is_available()
    assert main([*shlex.split(COMMAND)[1:], "profile=all.csv"]) == (0 if solved else 1)
    printed = capsys.readouterr().err
    assert printed.count(f"warning: {label}: left out of 2 problems: {place}: {raised}") == 1
    assert printed.count(place) == (1 if solved else 3), "who has no candidate says why"
    assert printed.count("warning: no valid candidate for relu2 M=") == (0 if solved else 2)
    profiled = [row for row in _rows(mine.parent / "all.csv") if row["libtype"] == label]
    assert [(row["status"], row["config"]) for row in profiled] == [("launch_error", "{}")] * 2
    if solved:
        assert len(_rows(mine.parent / "tuned" / "relu2_tuned_gemm.csv")) == 2


@pytest.mark.e2e
@pytest.mark.usefixtures("own_locks")
@pytest.mark.parametrize(
    ("name", "was", "status"),
    [
        pytest.param(
            "reference",
            "lambda spec, inputs, weights: product(spec, inputs, weights).relu_().square_(),",
            "died",
            marks=pytest.mark.slow,
        ),
        pytest.param("make_weights", "make_weights,", "died", marks=pytest.mark.slow),
        ("tolerance", "squared_tolerance,", "launch_error"),
    ],
)
def test_what_a_family_raises_in_a_worker_is_told_with_its_line(
    name: str, was: str, status: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = _broken(mine, f"{name}={was}", f"{name}=lambda *_: 1 // 0,")
    assert main(shlex.split(COMMAND)[1:]) == 1
    printed = f"{place}: ZeroDivisionError: "
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning:" in line]
    assert warned, "told at all"
    assert all(printed in line for line in warned)
    (run,) = (mine.parent / "outputs" / "runs" / "tune").iterdir()
    failed = [row for row in _rows(run / "trials.csv") if row["status"] == status]
    assert failed
    assert all(printed in row["error"] for row in failed)


@pytest.mark.e2e
def test_what_raises_is_the_same_in_another_process(
    mine: Path, monkeypatch: pytest.MonkeyPatch, h200: Device, no_words: KernelDefaults
) -> None:
    place = _broken(mine, 'if knobs["NUM_KSPLIT"] != 1:', 'if 8 % (knobs["num_warps"] - 4):')
    monkeypatch.syspath_prepend(str(mine))
    family = load_family("relu2")
    [problem] = InlineShapes(items=[[64, 512, 1024]]).problems(family, no_words, h200.gfx)
    axes = {"BLOCK_SIZE_M": (64,), "BLOCK_SIZE_N": (128, 256), "BLOCK_SIZE_K": (64,), "num_warps": (4, 8)}
    space = Space(axes={**axes, "num_stages": (3,), "GROUP_SIZE_M": (1,)}, when=(), pinned=())
    arguments = (family.implementations, h200, space, ())
    here = list_candidates(problem, family, *arguments)
    compilers = CompilePool(h200, 1, 60.0, (str(mine),))
    try:
        there = compilers.submit_task(partial(list_by_family_name, problem, "relu2", *arguments)).result(timeout=600)
    finally:
        compilers.close(kill=True)
    assert there == here
    excluded = here.summary.excluded
    failed = [e for s, e in zip(excluded["status"], excluded["error"], strict=True) if s == Status.LAUNCH_ERROR]
    assert [error.startswith(f"{place}: ZeroDivisionError") for error in failed] == [True, True]
    assert here.summary.report.warnings() == [f"triton: 2 candidates failed: {excluded['error'][0]}"]
    assert {c.knobs["num_warps"] for c in here.candidates if c.backend == "triton"} == {8}


_INTERPRET = """
import json, sys, torch
from gemmpipe.core.data import Device, Status
from gemmpipe.core.device import arch_device
from gemmpipe.executors.compile_pool import CompilePool as Compilers
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio

family, device = load_family("relu2"), arch_device("sm_90")
defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
kernel, _ = family.implementations
for m, n, k, dtype in ((16, 64, 64, "float16"), (33, 80, 72, "bfloat16"), (1, 64, 100, "float16")):
    key = {"M": m, "N": n, "K": k, "dtype": dtype, "outdtype": dtype}
    spec = family.spec(make_problem(family, key, defaults, "", ""))
    generator = torch.Generator().manual_seed(3)
    inputs, weights = family.make_inputs(spec, generator), family.make_weights(spec, generator)
    sizes = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64}
    knobs = kernel.normalise(spec, {**sizes, "num_warps": 4, "num_stages": 3}, device)
    out = torch.full((m, n), float("nan"), dtype=getattr(torch, dtype))
    launch = kernel.bind(spec, knobs, device, inputs, kernel.prepare(spec, weights, knobs), out)
    reference = family.reference(spec, inputs, weights)
    print(error_ratio(launch(), reference, *family.tolerance(spec)))
"""


# Triton 3.6's interpreter loops over one-element arrays, which numpy 2.4 no longer turns into integers.
@pytest.mark.slow  # it imports torch
@pytest.mark.skipif(
    triton.__version__.startswith("3.6") and int(numpy.__version__.split(".")[1]) >= 4,
    reason="triton 3.6 interprets with numpy before 2.4 only",
)
def test_its_kernel_computes_what_it_says(mine: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(mine), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRET], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [float(line) for line in done.stdout.split()] == [0, 0, 0]


@pytest.mark.compile
@pytest.mark.parametrize("gfx", ["sm_90", pytest.param("gfx950", marks=pytest.mark.slow)])
def test_its_kernel_compiles_without_a_gpu(mine: Path, monkeypatch: pytest.MonkeyPatch, gfx: str) -> None:
    monkeypatch.syspath_prepend(str(mine))
    family, device = load_family("relu2"), arch_device(gfx)
    kernel = family.implementations[0]
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": 64, "N": 512, "K": 1024}, defaults, gfx, "test"))
    sizes = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64}
    knobs = kernel.normalise(spec, {**sizes, "num_warps": 4, "num_stages": 2}, device)
    assert kernel.unsupported_reason(spec, knobs, device) is None
    (build,) = kernel.builds(spec, knobs, device)
    assert compile_build(build, device).error == ""
