"""Names of version 0.1.0 that are read for one version: keys, options, stages, classes, modules, methods, keywords."""

import csv
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmpipe.cli.main import main
from gemmpipe.cli.old_keys import current_overrides
from gemmpipe.core import renamed
from gemmpipe.core.data import Bucket, Candidate, Status
from gemmpipe.core.renamed import current_path, take_notices
from gemmpipe.family import Implementation, KeyColumn
from gemmpipe.pipeline.plan import Plan
from gemmpipe.search.forest import Forest
from gemmpipe.search.gaussian_process import Gaussian
from gemmpipe.search.simple import HalvingConfig
from gemmpipe.stages.capture import Capture
from gemmpipe.stages.verify_report import VerifyReport

PAGE = (Path(__file__).parent / "data" / "own_family_0.1.0.md").read_text()
FILES = re.findall(r"^`(mine/[\w/.]+)`:\n\n```\w+\n(.*?)```$", PAGE, re.DOTALL | re.MULTILINE)
(COMMAND,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
WORDS = ["kernel=a16w16", "shapes=list", "shapes.items=[[1,64,64]]", "device=cpu", "backend=[torch]", "output=tuned"]


@pytest.fixture(autouse=True)
def fresh_notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has used no old name yet."""
    monkeypatch.setattr(renamed, "_reported", set())
    monkeypatch.setattr(renamed, "_notices", [])
    return


def _notices(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    return [line.removeprefix("warning: ") for line in lines if ": renamed; use " in line]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("search.share=0.2", "search.trial_fraction=0.2"),
        ("++search.looks.keep_ratio=0.5", "++search.rungs.keep_fraction=0.5"),
        ("search=learned", "search=forest"),
        ("search=learned,random", "search=forest,random"),
        ("search@search.of=learned", "search@search.algorithm=forest"),
        ("search.of.share=0.2", "search.algorithm.trial_fraction=0.2"),
        ("stages.engine.search.least=3", "stages.engine.search.min_trials=3"),
        ("stages.report.within_pct=5", "stages.verify_report.max_drift_pct=5"),
        ("stages.report={within_pct:5,behind_pct:2}", "stages.verify_report={max_drift_pct:5,max_behind_pct:2}"),
        ('stages={"report":{within_pct:"of: 5"}}', 'stages={"report":{within_pct:"of: 5"}}'),
        ("stages={report:{within_pct:5}}", "stages={verify_report:{max_drift_pct:5}}"),
        ("stage@stages.called=called", "stage@stages.verify_calls=verify_calls"),
        ("timer@stages.called.timer=quick", "timer@stages.verify_calls.timer=quick"),
        ("~stage@stages.slower", "~stage@stages.lint_timings"),
        ("chain=[load,bench,called,report]", "chain=[load,bench,verify_calls,verify_report]"),
        ("stages.load.of=table", "stages.load.read=table"),
        ("stages.compare.against='x of: y'", "stages.compare.baseline='x of: y'"),
        ("stages.compare.rates.sm_90.bytes_per_s=5e12", "roofline.h200.bytes_per_s=5e12"),
        ("+stages.compare.rates.gfx942={bytes_per_s:1e12}", "+roofline.gfx942={bytes_per_s:1e12}"),
        ("stages.compare.ratesome=1", "stages.compare.ratesome=1"),
        ("shapes.path=report/called.csv", "shapes.path=report/called.csv"),
        ("output=share", "output=share"),
        ("kernel.key.rows=3", "kernel.key.rows=3"),
    ],
)
def test_overrides(old: str, new: str) -> None:
    assert current_overrides([old], None) == (new,)
    assert bool(take_notices()) == (old != new)


def test_a_command_line_with_old_keys(plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    old = [
        "search=learned",
        "search.best=0.3",
        "search.share=0.2",
        "search.looks.most_launches=8",
        "stages.capture.tuned_too=true",
    ]
    assert main(["tune", *WORDS, *old]) == 0
    [plan] = plans
    assert isinstance(plan.search, Forest)
    assert (plan.search.good_fraction, plan.search.trial_fraction) == (0.3, 0.2)
    assert plan.search.rungs.max_launches == 8
    capture = plan.stages["capture"]
    assert isinstance(capture, Capture)
    assert capture.include_tuned
    assert _notices(capsys) == [
        "search=learned: renamed; use search=forest",
        "search.best: renamed; use search.good_fraction",
        "search.share: renamed; use search.trial_fraction",
        "search.looks.most_launches: renamed; use search.rungs.max_launches",
        "stages.capture.tuned_too: renamed; use stages.capture.include_tuned",
    ]
    assert main(["tune", *WORDS, *old]) == 0
    assert _notices(capsys) == [], "once per name and process"


def test_an_error_shows_the_notices_too(plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *WORDS, "search.share=2"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "warning: search.share: renamed; use search.trial_fraction",
        "gemmpipe: search.trial_fraction: 2 given, expected above 0 and at most 1",
    ]


def test_printing_the_configuration_shows_the_notices_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "tune", *WORDS, "search.share=0.2"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["warning: search.share: renamed; use search.trial_fraction"]
    assert "trial_fraction: 0.2" in printed.out
    assert "warning" not in printed.out


def test_a_recipe_with_old_keys(folder: Path, plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "old.yaml").write_text(
        "version: 1\npipeline: verify\nkernel: a16w16\nsearch: {share: 0.2}\n"
        "stages.report: {within_pct: 7}\nstages.called.err_ratio: 0.1\n"
    )
    assert main(["old.yaml", "search.trial_fraction=0.3"]) == 0
    [plan] = plans
    report = plan.stages["verify_report"]
    assert isinstance(report, VerifyReport)
    assert report.max_drift_pct == 7
    assert isinstance(plan.search, Gaussian)
    assert plan.search.trial_fraction == 0.3, "typed after the recipe"
    assert "stages.report.within_pct: renamed; use stages.verify_report.max_drift_pct" in _notices(capsys)


PIPELINE = """
defaults:
  - _base
  - stage@stages.load: load_table
  - stage@stages.called: called
  - timer@stages.called.timer: accurate
  - stage@stages.report: strict
  - override search: learned
  - _self_

chain: [load, bench, called, report]
search:
  share: 0.4
  looks: {keep_ratio: 0.5}
stages:
  capture: {keep_pct: 90}
  report: {behind_pct: "${stages.report.within_pct}"}
"""
NARROW = """
defaults: [gaussian, _self_]
share: 0.3
looks:
  _target_: gemmpipe.search.looks.Looks
"""


@pytest.fixture
def mine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    files = {
        "nightly.yaml": PIPELINE,
        "search/narrow.yaml": NARROW,
        "stage/strict.yaml": "defaults: [report, _self_]\nwithin_pct: 7\n",
    }
    for name, text in files.items():
        path = folder / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield folder / "mine"
    for name in ("relu2", "own_search", "own_stages"):
        sys.modules.pop(name, None)


def test_files_of_a_config_dir(mine: Path, plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--config-dir={mine}", "nightly", *WORDS]) == 0
    [plan] = plans
    assert plan.chain == ("load", "bench", "verify_calls", "verify_report")
    assert isinstance(plan.search, Forest)
    assert (plan.search.trial_fraction, plan.search.rungs.keep_fraction) == (0.4, 0.5)
    report, capture = plan.stages["verify_report"], plan.stages["capture"]
    assert isinstance(report, VerifyReport)
    assert isinstance(capture, Capture)
    assert (report.max_drift_pct, report.max_behind_pct, capture.cover_pct) == (7, 7, 90)
    shown = _notices(capsys)
    assert len(shown) == len(set(shown))
    assert {"search.share: renamed; use search.trial_fraction", "search=learned: renamed; use search=forest"} <= set(
        shown
    )


def test_a_class_of_the_old_tree(mine: Path, plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--config-dir={mine}", "tune", *WORDS, "search=narrow", "search.trial_fraction=0.6"]) == 0
    [plan] = plans
    assert isinstance(plan.search, Gaussian)
    assert plan.search.trial_fraction == 0.6, "what is typed counts, by whichever name"
    assert isinstance(plan.search.rungs, HalvingConfig)
    told = "gemmpipe.search.looks.Looks: renamed; use gemmpipe.search.simple.HalvingConfig"
    assert told in _notices(capsys)


OWN_SEARCH = """
from dataclasses import dataclass

from gemmpipe.search import Hunt, Request, Search, Subject
from gemmpipe.search.looks import Looks


class Everything(Hunt):
    def __init__(self, subject):
        assert set(subject.given) <= set(subject.candidates)
        self.rest, self.waiting = list(subject.candidates), len(subject.candidates)

    def ask(self):
        rest, self.rest = self.rest, []
        return [Request(candidate=c, launches=1, glance=True) for c in rest]

    def tell(self, trials):
        self.waiting -= len(trials)

    def end(self, dropped):
        self.waiting, self.rest = 0, []

    @property
    def over(self):
        return self.waiting == 0


@dataclass(frozen=True, kw_only=True)
class Own(Search):
    share: float
    looks: Looks

    def start(self, subject):
        return Everything(subject)
"""


@pytest.mark.usefixtures("own_locks")
def test_a_search_of_the_users_own(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own key `share` stays what it is."""
    (mine / "search" / "own.yaml").write_text("defaults: [_looks, _self_]\n_target_: own_search.Own\nshare: 0.5\n")
    (mine / "own_search.py").write_text(OWN_SEARCH)
    assert main([f"--config-dir={mine}", "tune", *WORDS, "search=own", "search.share=0.9"]) == 0
    shown = _notices(capsys)
    assert "gemmpipe.search.Hunt: renamed; use gemmpipe.search.SearchSession" in shown
    assert "Everything.over: renamed; use Everything.finished" in shown
    assert not [line for line in shown if line.startswith("search.share")]


OWN_STAGES = """
from dataclasses import dataclass

from gemmpipe.stages import Stage


@dataclass(frozen=True, kw_only=True)
class FewRows(Stage):
    needs = ("problems",)
    gives = ("problems",)

    def run(self, tables, context):
        frame = tables["problems"]
        return {"problems": frame[frame["M"] < 64]}


@dataclass(frozen=True, kw_only=True)
class Report(Stage):
    needs = ("problems", "selections")
    gives = ()

    def run(self, tables, context):
        context.final_lines.append(f"Ms: {tables['problems']['M'].tolist()} {[p.rows for p in context.problems]}")
        return {}
"""


@pytest.mark.usefixtures("own_locks")
def test_own_stages_with_a_table_of_problems(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / "own_stages.py").write_text(OWN_STAGES)
    for key, name in {"few_rows": "FewRows", "report": "Report"}.items():
        path = mine / "stage" / f"{key}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"_target_: own_stages.{name}\n")
    stages = ["+stage@stages.few_rows=few_rows", "+stage@stages.report=report"]
    chain = "chain=[capture,few_rows,screen,bench,select,report]"
    items = "shapes.items=[[[1,8,64],64,64]]"
    assert main([f"--config-dir={mine}", "tune", *WORDS, items, *stages, chain, "batch=1"]) == 0
    assert "Ms: [1, 8] [1, 8]" in capsys.readouterr().out
    (written,) = (mine.parent / "outputs" / "runs" / "tune").glob("*/problems.csv")
    assert [row["M"] for row in csv.DictReader(written.open(newline=""))] == ["1", "8"]


@pytest.mark.usefixtures("own_locks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_family_of_the_documents_as_it_was(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in FILES:
        path = mine.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert main(shlex.split(COMMAND)[1:]) == 0
    shown = _notices(capsys)
    with (mine.parent / "tuned" / "relu2_tuned_gemm.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["M"], row["N"], row["libtype"]) for row in rows if row["libtype"] == "eager"], rows
    assert len(shown) == len(set(shown))
    assert {
        "gemmpipe.templates.tiled.Tiled: renamed; use gemmpipe.templates.tiled.TiledKernel",
        "gemmpipe.templates.tiles.place: renamed; use gemmpipe.templates.device_fns.swizzle2d",
        "Eager.points: renamed; use Eager.configs",
        "Fused.misfit: renamed; use Fused.unsupported_reason",
    } <= set(shown)


@pytest.mark.usefixtures("own_locks")
@pytest.mark.parametrize("key", ["resume", "reuse"])
def test_a_run_made_before(key: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *WORDS, "search=random", "search.trial_fraction=0.5"]) == 0
    (run,) = (folder / "outputs" / "runs" / "tune").iterdir()
    kept = run / ".hydra" / "overrides.yaml"
    kept.write_text(kept.read_text().replace("trial_fraction", "share"))
    capsys.readouterr()
    assert main([f"{key}={run}", "search.trial_fraction=0.5"]) == 0
    assert _notices(capsys) == ["search.share: renamed; use search.trial_fraction"]


def test_an_option_of_the_users_own_keeps_its_name(mine: Path, plans: list[Plan]) -> None:
    (mine / "search" / "learned.yaml").write_text("defaults: [random, _self_]\nshare: 0.7\n")
    assert main([f"--config-dir={mine}", "tune", *WORDS, "search=learned"]) == 0
    assert type(plans[0].search).__name__ == "Random"


def _said(code: str, *flags: str) -> str:
    """The output of a fresh process on stdout and stderr."""
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_old_modules_load_nothing_heavy_and_warn_once() -> None:
    shown = _said(
        "import sys\n"
        "import gemmpipe.data, gemmpipe.launching.builds\n"
        "from gemmpipe.templates.fits import tile_misfit\n"
        "from gemmpipe.operand_types import refuse_bias\n"
        "import gemmpipe.templates.tiles\n"
        "from gemmpipe.templates import fits\n"
        "fits.tile_misfit, fits.tile_misfit\n"
        "from gemmpipe.data import Problem\n"
        "from gemmpipe.core.data import Problem as current\n"
        "assert Problem is current and gemmpipe.data.Problem is current\n"
        "print('torch' in sys.modules, 'triton' in sys.modules)\n",
        "-W",
        "always",
    )
    assert "False False" in shown
    for old, new in {
        "gemmpipe.templates.fits.tile_misfit": "gemmpipe.templates.constraints.tile_violation",
        "gemmpipe.operand_types.refuse_bias": "gemmpipe.family.dtypes.reject_bias",
        "gemmpipe.data.Problem": "gemmpipe.core.data.Problem",
    }.items():
        assert shown.count(f"DeprecationWarning: {old}: renamed; use {new}") == 1, shown


def test_the_runtime_functions_of_before() -> None:
    shown = _said(
        "from gemmpipe import runtime\n"
        "assert runtime.answers is runtime.answers is runtime.dispatch_report\n"
        "from gemmpipe.runtime import forget, prepare\n"
        "assert (forget, prepare) == (runtime.release_prepared, runtime.prepare_weight)\n",
        "-W",
        "always",
    )
    for old, new in {"answers": "dispatch_report", "forget": "release_prepared", "prepare": "prepare_weight"}.items():
        assert shown.count(f"gemmpipe.runtime.{old}: renamed; use gemmpipe.runtime.{new}") == 1, shown


def test_what_is_nowhere_is_an_ordinary_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'gemmpipe\.nowhere'"):
        __import__("gemmpipe.nowhere")
    with pytest.raises(ImportError, match=r"cannot import name 'Nothing' from 'gemmpipe\.search\.looks'"):
        from gemmpipe.search.looks import Nothing
    with pytest.raises(ImportError, match=r"cannot import name 'Nothing' from 'gemmpipe\.search'"):
        from gemmpipe.search import Nothing  # noqa: F401


def test_paths_of_classes() -> None:
    assert current_path("gemmpipe.formats.native.Csv") == "gemmpipe.formats.native.NativeCsv"
    assert current_path("gemmpipe.stages.called.Called") == "gemmpipe.stages.verify_calls.VerifyCalls"
    assert current_path("gemmpipe.search.halving.Halving") == "gemmpipe.search.simple.Halving"
    assert current_path("mine.Own") == "mine.Own"
    assert current_path("gemmpipe.search.simple.Halving") == "gemmpipe.search.simple.Halving"


def test_options_and_documents_of_the_old_version_name_what_exists() -> None:
    """Every `_target_` of its configuration, and every import of its documents."""
    names = (Path(__file__).parent / "data" / "names_0.1.0.txt").read_text().split()
    assert len(names) == 69
    for name in names:
        module, _, attribute = current_path(name).rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_keywords_and_members() -> None:
    with pytest.warns(DeprecationWarning, match=r"Bucket\(must=\): renamed; use Bucket\(required_knobs=\)"):
        bucket = Bucket(format="f", name="n", low=0, high=16, must=(("BLOCK", 16),))  # type: ignore[call-arg]
    assert bucket.required_knobs == (("BLOCK", 16),)
    with pytest.warns(DeprecationWarning, match=r"Bucket\.holds: renamed; use Bucket.contains"):
        assert bucket.holds(16)  # type: ignore[attr-defined]
    assert bucket.admits(Candidate.of("triton", {"BLOCK": 16}))  # type: ignore[attr-defined]
    assert (Status.UNFIT, Status.DROPPED, Status.WRONG) == (Status.UNSUPPORTED, Status.PRUNED, Status.INCORRECT)  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"KeyColumn\(words=\): renamed; use KeyColumn\(choices=\)"):
        column = KeyColumn(name="act", kind="str", words=(("silu", "Silu"),))  # type: ignore[call-arg]
    assert column == KeyColumn(name="act", kind="str", choices=(("silu", "Silu"),))
    with pytest.raises(TypeError, match=r"Bucket.__init__\(\) got an unexpected keyword argument 'mst'"):
        Bucket(format="f", name="n", low=0, high=16, mst=())  # type: ignore[call-arg]


def test_methods_of_an_implementation() -> None:
    class Base(Implementation):
        label = "base"

        def configs(self, spec, device, space):  # type: ignore[no-untyped-def]
            return [{"a": 1}]

        def unsupported_reason(self, spec, knobs, device):  # type: ignore[no-untyped-def]
            return "base: none fits"

        def bind(self, *args: object, **named: object) -> object:  # type: ignore[override]
            return None

    with pytest.warns(DeprecationWarning, match=r"Own\.misfit: renamed; use Own\.unsupported_reason"):

        class Own(Base):
            def misfit(self, spec, knobs, device):  # type: ignore[no-untyped-def]
                return f"own, {super().misfit(spec, knobs, device)}"  # type: ignore[misc]

    assert Own().unsupported_reason(None, {}, None) == "own, base: none fits"
    assert Own().points(None, None, None) == [{"a": 1}]  # type: ignore[attr-defined]
