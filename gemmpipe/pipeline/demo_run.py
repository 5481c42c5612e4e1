"""`gemmpipe demo`: the default search replayed on a shipped recording of an H200's space, as a run folder.

The folder has the files of a run, so that a finished run can be looked at without a GPU. Nothing in it is measured: its
manifest and its journal name the recording, the policy of its rows is refused by tables, and it is not among the runs
under outputs/runs, which later runs learn from.
"""

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gemmpipe import __version__
from gemmpipe.core import schema
from gemmpipe.core.data import FINALS, Device, Problem, Status, Trial, median
from gemmpipe.core.files import read_regular
from gemmpipe.core.paths import DEMOS, MANIFEST, PACKAGE, shipped, write_atomic
from gemmpipe.family import Family, GemmSpec, load_family
from gemmpipe.journal import Journal
from gemmpipe.pipeline.build import build_option
from gemmpipe.pipeline.manifest import table_text
from gemmpipe.search import Search
from gemmpipe.search import recorded as recordings
from gemmpipe.search.history import History
from gemmpipe.search.recorded import RecordedSpace
from gemmpipe.search.simulator import NEAR_BEST, ReplayConfig, SimulatedRun, simulate
from gemmpipe.stages.rows import problem_frame, trial_frame
from gemmpipe.stages.select import Select
from gemmpipe.stages.selection_rules import Finalist, SelectionRules, select_finalist
from gemmpipe.stages.selections import base_row, comparison
from gemmpipe.tables.merge import REPLAYED

if TYPE_CHECKING:
    import pandas as pd

RECORDING = PACKAGE / "pipeline" / "demo_h200.jsonl.xz"
"""A part of tests/data/recorded/h200_a8w8_blockscale.jsonl.xz: three weights with three Ms each."""
_SEARCH = "gaussian"
_MAX_OPTION_BYTES = 100_000


@dataclass(frozen=True, kw_only=True)
class ReplayedProduct:
    """The result of the replay for one problem."""

    problem: Problem
    chosen_us: float
    """The time of the choice as in the run's selections: of the samples that its finals drew."""
    recorded_us: float
    """The recorded time of the choice."""
    best_us: float
    """The time of the best recorded candidate."""
    median_us: float
    """The time of the median of all recorded candidates."""
    timed: int
    """Candidates that the search timed."""
    recorded: int
    """Candidates with a recorded time or failure."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """A finished replay."""

    folder: Path
    device: str
    recorded_on: str
    """The day of the recording, ISO."""
    family: str
    search: str
    products: tuple[ReplayedProduct, ...]
    simulated_s: float
    """The recorded seconds of the search: compilation and timing."""
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class _RowFacts:
    """The facts of a run that rows of selections contain."""

    family: Family
    device: Device
    run_id: str
    policy: str
    cut_short: AbstractSet[str] = field(default_factory=frozenset)


def replay_demo(folder: Path, recording_path: Path = RECORDING) -> Demo:
    """Replay the default search on a recording and write its run folder; returns the figures to print.

    Raises UserError for a damaged recording and EnvironmentProblem if the folder cannot be written.
    """
    began = time.monotonic()
    recording = recordings.read(recording_path)
    family = load_family(recording.family)
    replay = _Replay(recording=recording, family=family, folder=folder)
    tables, products = replay.run()
    for name, frame in tables.items():
        write_atomic(folder / f"{name}.csv", table_text(frame))
    wall_s = round(time.monotonic() - began, 3)  # as the manifest has it: rounded once, it reads the same everywhere
    demo = Demo(
        folder=folder,
        device=recording.device.name,
        recorded_on=recording.recorded_at[:10],
        family=recording.family,
        search=_SEARCH,
        products=products,
        simulated_s=replay.now_s,
        wall_s=wall_s,
    )
    write_atomic(folder / MANIFEST, json.dumps(_manifest(demo, recording, replay), indent=2) + "\n")
    return demo


def demo_folder() -> Path:
    """A new folder for a replay, named by the time."""
    return DEMOS / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")


def option_values(group: str, name: str) -> dict[str, Any]:
    """The values of a shipped option, with those that its `defaults` include from the same group."""
    path = shipped("conf") / group / f"{name}.yaml"
    tree = yaml.safe_load(read_regular(path, "a shipped option", _MAX_OPTION_BYTES).decode())
    found: dict[str, Any] = {}
    for entry in tree.pop("defaults", ["_self_"]):
        if not isinstance(entry, str):
            continue  # an option of another group
        found = _merged(found, tree if entry == "_self_" else option_values(group, entry))
    return found


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `over` in place of those of `base`, key by key in nested mappings."""
    found = dict(base)
    for key, value in over.items():
        before = found.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[key] = _merged(before, value) if both else value  # type: ignore[arg-type]
    return found


class _Replay:
    """One replay: simulates the search, and records it as a run does."""

    def __init__(self, *, recording: RecordedSpace, family: Family, folder: Path) -> None:
        self.recording, self.family = recording, family
        self.device = recording.device
        self.now_s = 0.0
        self.search_values = option_values("search", _SEARCH)
        self._replay_values = option_values("search", "replay")
        self._keep = int(option_values("stage", "screen")["keep"])
        select: Select = build_option(option_values("stage", "select"), Select, "stages.select")
        self._rules = SelectionRules(
            prefer=select.prefer, min_improvement_pct=select.min_improvement_pct, tie_pct=select.tie_pct
        )
        self._facts = _RowFacts(
            family=family,
            device=self.device,
            run_id=folder.name,
            policy=f"{REPLAYED} {recording.recorded_at[:10]}",
        )
        self._folder = folder
        self._trials: dict[tuple[str, str], Trial] = {}
        self._built: set[str] = set()

    def run(self) -> "tuple[dict[str, pd.DataFrame], tuple[ReplayedProduct, ...]]":
        """Simulate, and write the journal; returns the run's tables and the results."""
        import pandas as pd

        pairs = [(problem, self.family.spec(problem)) for problem in self.recording.problems]
        search: Search = build_option(self.search_values, Search, "search")
        config = ReplayConfig(
            keep=self._keep,
            rounds=int(self._replay_values["rounds"]),
            compile_slots=int(self._replay_values["compile_slots"]),
        )
        with closing(Journal(self._folder, clock=lambda: self.now_s)) as journal:
            self._begin(journal)
            simulated = simulate(
                self.recording,
                pairs,
                search,
                History(),
                config,
                search_seed(self.search_values),
                self._observer(journal),
            )
            finals = [trial for run in simulated for trial in self._finals(run, journal)]
        rows = [self._selection(run, spec) for run, (_, spec) in zip(simulated, pairs, strict=True)]
        keys = [column.name for column in self.family.key_columns]
        tables = {
            "problems": problem_frame(self.family, [problem for problem, _ in pairs]),
            "trials": trial_frame([*self._trials.values(), *finals], {}),
            "selections": pd.DataFrame(rows, columns=[*schema.SELECTIONS, *keys]),
        }
        chosen_us = [float(str(row["us"])) for row in rows]
        return tables, tuple(self._product(run, us) for run, us in zip(simulated, chosen_us, strict=True))

    def _begin(self, journal: Journal) -> None:
        recorded_at = self.recording.recorded_at
        journal.write(
            "session",
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            pipeline="demo",
            overrides=[],
            device={**asdict(self.device), "uuid": ""},
            versions={**self.recording.versions, REPLAYED: recorded_at},  # equal to those of no other run
            conditions={},
            replayed=recorded_at,
        )
        for problem in self.recording.problems:
            journal.write("problem", id=problem.id, key=dict(problem.key), weight=problem.weight, layer=problem.layer)

    def _observer(self, journal: Journal) -> Callable[[Trial, float], None]:
        problems = {problem.id: outcomes for problem, outcomes in self.recording.problems.items()}

        def observe(trial: Trial, at_s: float) -> None:
            self.now_s = at_s
            builds = problems[trial.problem][trial.candidate].builds
            for build in builds:
                if build not in self._built:
                    self._built.add(build)
                    journal.build(build, self.recording.facts[build])
            journal.builds[trial.problem, trial.candidate.id] = builds
            journal.trial(trial)
            self._trials[trial.problem, trial.candidate.id] = trial

        return observe

    def _finals(self, run: SimulatedRun, journal: Journal) -> list[Trial]:
        """The finals of a problem as trials, after all searches."""
        found = []
        for candidate, samples in run.finals_us.items():
            self.now_s += sum(samples) / 1e6
            rounded = tuple(round(sample, 4) for sample in samples)
            trial = Trial(
                stage=FINALS,
                problem=run.problem.id,
                candidate=candidate,
                status=Status.OK,
                launches=len(rounded),
                samples_us=rounded,
            )
            journal.trial(trial)
            found.append(trial)
        journal.write("done", stage=FINALS, problem=run.problem.id)
        return found

    def _selection(self, run: SimulatedRun, spec: GemmSpec) -> dict[str, object]:
        """The row of a problem, chosen by the rules of a run; a recording has no errors of results, only checks."""
        finalists = [
            Finalist(
                candidate=candidate,
                samples_us=samples,
                extra_weight_bytes=0,
                err_ratio=float("nan"),
                kernel_name=candidate.backend,
            )
            for candidate, samples in run.finals_us.items()
        ]
        selection = select_finalist(finalists, self.family.baseline, (), self._rules)
        return {**base_row(run.problem, spec, selection.chosen, self._facts), **comparison(selection)}

    def _product(self, run: SimulatedRun, chosen_us: float) -> ReplayedProduct:
        outcomes = self.recording.problems[run.problem]
        times = [outcome.time_us for outcome in outcomes.values() if outcome.time_us is not None]
        recorded_us = outcomes[run.chosen].time_us if run.chosen is not None else None
        assert recorded_us is not None, "a recording has a timed candidate for every problem"
        return ReplayedProduct(
            problem=run.problem,
            chosen_us=chosen_us,
            recorded_us=recorded_us,
            best_us=min(times),
            median_us=median(times),
            timed=run.evaluations,
            recorded=len(outcomes),
        )


def search_seed(values: Mapping[str, Any]) -> int:
    """The seed of a search's option."""
    return int(values.get("seed", 0))


def _manifest(demo: Demo, recording: RecordedSpace, replay: _Replay) -> dict[str, object]:
    """The manifest of a replay: the keys of a run's, and `replayed`, which a run's does not have."""
    device = recording.device
    return {
        "gemmpipe": __version__,
        "pipeline": "demo",
        "overrides": [],
        "replayed": {
            "note": "times replayed from a recording; nothing was measured in this run",
            "device": device.name,
            "recorded": recording.recorded_at,
            "command": recording.command,
            "versions": dict(recording.versions),
            "simulated_s": round(demo.simulated_s, 3),
            "candidates": sum(product.recorded for product in demo.products),
            "timed": sum(product.timed for product in demo.products),
        },
        "config": {
            "kernel": {"family": recording.family},
            "search": replay.search_values,
            "chain": ["replay", "select"],
        },
        "provenance": {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "gemmpipe": __version__,
            "device": device.name,
            "gfx": device.gfx,
            "cu_num": device.cu_num,
            "versions": {**recording.versions, REPLAYED: recording.recorded_at},
            "conditions": {},
            "recipe": "gemmpipe demo",
        },
        "exit_code": 0,
        "wall_s": demo.wall_s,
        "account_s": {"replay_s": demo.wall_s},
        "resources": [],
        "unsolved": [],
        "undecided": [],
        "workload": None,
        "files": [],
    }


def near_best(products: Sequence[ReplayedProduct]) -> int:
    """Products with a choice within 1 % of the best recorded candidate."""
    return sum(product.recorded_us <= NEAR_BEST * product.best_us for product in products)
