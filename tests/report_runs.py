"""Folders of runs for tests of the report: times recorded on an H200, written through the journal's own writer."""

import json
from dataclasses import asdict
from pathlib import Path

from gemmpipe.core.data import Candidate, Status, Trial
from gemmpipe.journal import Journal
from gemmpipe.search import recorded
from gemmpipe.search.recorded import Outcome

RECORDING = Path(__file__).parent / "data" / "recorded" / "h200_a8w8_blockscale.jsonl.xz"
SECTIONS = {
    *("summary", "where", "time", "candidates", "search", "knobs", "space", "ties", "winners", "wall", "conditions"),
    *("missing", "provenance"),
}
"""The sections of a finished run with all its files."""
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&="
"""A name that would be markup, an attribute's end, or a formula where it is not escaped."""
_FINALISTS = 5
_ROUNDS = 10


def write_recorded_run(folder: Path, *, problems: int = 4, candidates: int = 60, finals: int | None = None) -> None:
    """A journal with evenly spaced candidates of recorded problems; `finals`: problems with finals (None: all).

    The times are the recorded ones; conditions are those of an idle H200 at the start of a run.
    """
    space = recorded.read(RECORDING)
    journal = Journal(folder)
    journal.write("session", pipeline="tune", overrides=["kernel=a8w8_blockscale"], device=asdict(space.device))
    chosen = list(space.problems.items())[:problems]
    for problem, _ in chosen:
        journal.write("problem", id=problem.id, key=dict(problem.key), weight=1.0, layer="")
    for name, facts in list(space.facts.items())[:20]:
        journal.build(name, facts)
    for number, (problem, outcomes) in enumerate(chosen):
        journal.write("conditions", device="GPU-0", sm_mhz=1980, memory_mhz=3201, temperature_c=38, power_w=120.5)
        part = dict(list(outcomes.items())[:: max(1, len(outcomes) // max(1, candidates))][:candidates])
        for candidate, outcome in part.items():
            journal.trial(_trial("screen", problem.id, candidate, outcome))
        if finals is None or number < finals:
            timed = {c: o for c, o in part.items() if o.time_us is not None}
            for candidate in sorted(timed, key=lambda c: timed[c].time_us or 0.0)[:_FINALISTS]:
                journal.trial(_trial("bench", problem.id, candidate, timed[candidate]))
            journal.write("done", stage="bench", problem=problem.id)
    journal.close()


def _trial(stage: str, problem: str, candidate: Candidate, outcome: Outcome) -> Trial:
    samples = outcome.samples_us[:_ROUNDS]
    return Trial(
        stage=stage,
        problem=problem,
        candidate=candidate,
        status=outcome.status if samples or outcome.status is not Status.OK else Status.DIED,
        launches=len(samples),
        samples_us=samples,
        err_ratio=0.0 if stage == "bench" else None,
    )


def write_manifest(folder: Path, **changes: object) -> None:
    """A manifest of a finished run beside a journal."""
    resource = {"name": "cuda:0", "wall_s": 10.0, "busy_s": {"screening": 6.0, "finals": 3.0}, "idle_s": 1.0}
    content = {
        "pipeline": "tune",
        "overrides": [],
        "config": {"kernel": {"family": "a8w8_blockscale"}},
        "provenance": {"device": "NVIDIA H200", "versions": {"torch": "2.11.0"}},
        "exit_code": 0,
        "wall_s": 10.0,
        "resources": [resource],
        "unsolved": [],
        "undecided": [],
        "files": [],
        **changes,
    }
    (folder / "manifest.json").write_text(json.dumps(content))


def rewrite_journal(folder: Path, old: str, new: str) -> None:
    """Replace a text in all rows of a journal, as an attacker could."""
    path = folder / "trials.jsonl"
    path.write_text(path.read_text().replace(old, new))
