"""Listeners: a failing one is one warning, figures have valid names, the stream of JSON is complete."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gemmpipe.core.errors import UserError
from gemmpipe.core.events import Event, Events
from gemmpipe.family import load_family
from gemmpipe.listeners import Guarded, Listener, Product, Regime, RunOutcome, RunStart, failed, product_names
from gemmpipe.listeners.figures import metrics_of, parameters_of
from gemmpipe.listeners.json_stream import JsonStream
from gemmpipe.listeners.outcome import outcome_of
from gemmpipe.pipeline.build import build_option

START = RunStart(
    pipeline="tune",
    folder=Path("run"),
    command="gemmpipe tune",
    kernel="a16w16",
    options={"shapes": "list"},
    chain=("screen",),
)


def _product(m: int, **key: object) -> Product:
    return Product(
        problem=f"p M={m}",
        key={"M": m, "N": 8, **key},
        backend="torch",
        config="{}",
        time_us=2.0,
        library_us=4.0,
        speedup=2.0,
        floor_share=None,
        policy="accurate",
    )


OUTCOME = RunOutcome(
    state="finished",
    exit_code=0,
    wall_s=3.0,
    stage_s={"bench": 1.0},
    products=(_product(1), _product(4)),
    regimes=(Regime(label="M <= 64", products=2, speedup=2.0, floor_share=None),),
)


class _Failing(Listener):
    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def _called(self, name: str) -> None:
        self.calls += 1
        if name == self.where:
            raise ConnectionError("the server\nis away")

    def require(self) -> None:
        return

    def start(self, run: RunStart) -> None:
        self._called("start")

    def event(self, event: Event) -> None:
        self._called("event")

    def finish(self, outcome: RunOutcome) -> None:
        self._called("finish")


@pytest.mark.parametrize(("where", "calls"), [("start", 1), ("event", 2), ("finish", 4)])
def test_a_failing_listener_is_one_warning_and_is_called_no_more(where: str, calls: int) -> None:
    seen: list[Event] = []
    events = Events(listeners=[seen.append])
    listener = _Failing(where)
    guarded = Guarded("tracker", listener, events)
    guarded.start(START)
    events.listeners.append(guarded)
    events.emit("line", "one")
    events.emit("line", "two")
    guarded.finish(OUTCOME)
    guarded.finish(OUTCOME)
    assert listener.calls == calls
    warnings = [event.text for event in seen if event.kind == "warning"]
    assert warnings == ["listener tracker: ConnectionError: the server is away; it is left out, the run goes on"]
    assert [event.text for event in seen if event.kind == "line"] == ["one", "two"]


class _Placed(_Failing):
    def place(self) -> str:
        return "http://tracker/1"


@pytest.mark.parametrize(("where", "printed"), [("", ["tracker  http://tracker/1"]), ("finish", [])])
def test_the_place_of_the_run_is_told_after_its_end_unless_logging_failed(where: str, printed: list[str]) -> None:
    seen: list[Event] = []
    events = Events(listeners=[seen.append])
    listener = _Placed(where)
    guarded = Guarded("tracker", listener, events)
    events.listeners.append(guarded)
    guarded.start(START)
    guarded.finish(OUTCOME)
    assert [event.text for event in seen if event.kind == "line"] == printed
    assert listener.calls == 2, "no event after the end"


def test_metrics_have_names_that_trackers_take() -> None:
    found = metrics_of(OUTCOME)
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-/]+", name) for name in found)
    assert found["time_us/M1_N8"] == 2.0
    assert found["geomean/M_le_64/speedup"] == 2.0
    assert "geomean/M_le_64/floor_share" not in found, "not measured"
    assert metrics_of(failed(ValueError("x"))) == {"unsolved": 0.0, "products": 0.0}
    assert parameters_of(START)["shapes"] == "list"


def test_a_product_that_no_library_multiplies_as_stored_has_no_speedup(tmp_path: Path) -> None:
    header = "gfx,cu_num,M,N,K,libtype,config,us,policy,baseline,baseline_config,baseline_us"
    rows = [
        f"sm_90,132,{m},256,512,torch,,10,{policy},torch,{method},{us}"
        for m, method, us, policy in (
            (1, '"{""method"":""bfloat16_convert""}"', 10, "host interleaved shared_cpu"),
            (8, '"{""method"":""mm""}"', 20, ""),
        )
    ]
    (tmp_path / "selections.csv").write_text("\n".join([header, *rows]) + "\n")
    found = outcome_of(tmp_path, load_family("a8w8_blockscale"), {}, 0)
    assert [(each.speedup, each.library_us) for each in found.products] == [(None, None), (2.0, 20.0)]
    assert {name for name in metrics_of(found) if name.startswith("speedup/")} == {"speedup/M8_N256_K512"}
    assert [each.policy for each in found.products] == ["host interleaved shared_cpu", ""]


def test_products_that_differ_in_more_than_sizes_have_names_of_their_own() -> None:
    products = (_product(1, dtype="bf16"), _product(1, dtype="fp 8"))
    assert list(product_names(products)) == ["M1_N8_dtypebf16", "M1_N8_dtypefp_8"]
    assert list(product_names(products[:1])) == ["M1_N8"]


def test_progress_in_json_has_the_share_and_the_time_left_once_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("gemmpipe.listeners.json_stream.time.monotonic", lambda: now[0])
    lines: list[str] = []
    stream = JsonStream(lines.append)
    stream(Event(kind="step", text="screen", done=2, total=6, rest_s=20.0))
    stream(Event(kind="stage", text="screen", unit="trials"))
    stream(Event(kind="progress", text="listing configurations"))
    now[0] = 130.0
    stream(Event(kind="progress", done=50, total=100))
    first, last = [found for line in lines if (found := json.loads(line))["event"] == "progress"]
    assert first.keys().isdisjoint({"share", "left_s"})
    assert (last["share"], last["left_s"]) == (0.375, 50.0)


def test_every_event_is_one_line_of_json() -> None:
    lines: list[str] = []
    stream = JsonStream(lines.append)
    stream.start(START)
    for event in (
        Event(kind="stage", text="screen", total=7),
        Event(kind="progress", done=3, text="5 trials"),
        Event(kind="line", text="two\nlines"),
        Event(kind="warning", text="hot"),
        Event(kind="detail"),
    ):
        stream(event)
    stream.finish(OUTCOME)
    assert all("\n" not in line for line in lines)
    found = [json.loads(line) for line in lines]
    assert [each["event"] for each in found] == ["run", "stage", "progress", "line", "warning", "result"]
    assert {name: found[2][name] for name in ("stage", "done", "total")} == {"stage": "screen", "done": 3, "total": 7}
    assert found[-1]["products"][1]["key"] == {"M": 4, "N": 8}


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_a_missing_package_is_known_before_the_run(
    package: str, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = ["kernel=a16w16", "shapes=list", "shapes.items=[{M:[1],N:64,K:64}]", "device=cpu", f"listener={package}"]
    assert refusal(*line) == f"listener={package} needs {package}: pip install 'gemmpipe[{package}]'"


@pytest.mark.slow
@pytest.mark.e2e
def test_wandb_logs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from gemmpipe.listeners.wandb import Wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "t.csv").write_text("a\n")
    start = RunStart(
        pipeline="tune", folder=tmp_path, command="gemmpipe", kernel="a16w16", options={}, chain=("screen",)
    )
    listener = Wandb(project="p", entity=None, run_name=None, mode="offline", artifacts=True)
    listener.require()
    listener.start(start)
    (tmp_path / "report.html").write_text("<p>\n")
    listener.finish(replace(OUTCOME, report=tmp_path / "report.html"))
    folder, _, hint = listener.place().partition(" ")
    assert Path(folder).parent == tmp_path / "wandb"
    assert hint == "(offline: wandb sync FOLDER sends it)"
    wandb.teardown()  # its service writes the log; it ends with the process otherwise
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = log.read_bytes()
    assert b"time_us/M1_N8" in content
    assert b"t.csv" in content or b"gemmpipe-run" in content


WITHOUT_A_KEY = """
import sys
from pathlib import Path
from gemmpipe.listeners import RunStart
from gemmpipe.listeners.wandb import Wandb
listener = Wandb(project="p", entity=None, run_name=None, mode=None, artifacts=True)
try:
    listener.start(
        RunStart(pipeline="tune", folder=Path("."), command="gemmpipe", kernel="a16w16", options={}, chain=())
    )
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.e2e
def test_wandb_without_a_key_asks_for_none_in_a_terminal(tmp_path: Path) -> None:
    """It would ask under the live lines of the progress, where nobody sees it, and the run would wait."""
    pytest.importorskip("wandb")
    kept = {name: text for name, text in os.environ.items() if not name.startswith("WANDB_")}
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0), os.fdopen(theirs, "rb", buffering=0) as terminal:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_A_KEY],
            cwd=tmp_path,
            env={**kept, "HOME": str(tmp_path), "TERM": "xterm", "NETRC": str(tmp_path / "none")},
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=terminal,
            text=True,
            timeout=300,
        )
    assert done.stdout.startswith("UserError: No API key configured")
    assert done.stdout.rstrip().endswith("or add listener.wandb.mode=offline")


def test_a_listener_of_another_class_is_refused() -> None:
    with pytest.raises(UserError, match="is no Listener"):
        build_option({"_target_": "gemmpipe.formats.native.NativeCsv"}, Listener, "listener.x")
