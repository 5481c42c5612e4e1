"""The fastest entries of a comparison, what its tuned entries are, and times of a machine that others used."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from gemmpipe.core.data import FINALS, Candidate, Device, Status, Trial
from gemmpipe.core.events import Events
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.stages.compare.choices import choice_lines
from gemmpipe.stages.compare.lineup import LINEUP
from gemmpipe.stages.compare.plot import plot
from gemmpipe.stages.compare.stage import Compare
from gemmpipe.stages.compare.summary import lines, shared_line, summarize
from gemmpipe.stages.rows import trial_frame

FAMILY = load_family("a16w16")
MM, CONVERT, COPY = (Candidate.of("torch", {"method": m}) for m in ("mm", "float32_convert", "float32_copy"))
OTHER = Candidate.of("quack", {})
ENTRIES = {"tuned": MM, "torch mm": MM, "torch float32_convert": CONVERT, "torch float32_copy": COPY, "quack": OTHER}
STAGE = Compare(regimes=(64,), baseline=None, plot=False)


@pytest.fixture
def context(h200: Device, tmp_path: Path) -> Any:
    """The parts of a Context that the stage needs, on a CPU: two problems."""
    device = replace(h200, kind="cpu", gfx="cpu_avx2", name="a CPU")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    problems = [make_problem(FAMILY, {"M": m, "N": 64, "K": 128}, defaults, device.gfx, "case") for m in (4, 8)]
    warnings: list[str] = []
    events = Events(listeners=[lambda event: warnings.append(event.text) if event.kind == "warning" else None])
    return SimpleNamespace(
        family=FAMILY,
        device=device,
        rooflines={},
        problems=problems,
        unsolved=[],
        policy="host interleaved",
        run_dir=tmp_path / "runs/compare/now",
        final_lines=[],
        events=events,
        warnings=warnings,
    )


def _compared(context: Any, times_us: dict[Candidate, float], shared: tuple[int, ...] = ()) -> pd.DataFrame:
    """The stage's table for entries with these times; `shared`: the Ms that were timed while others used the CPU."""
    trials, lineup = [], []
    for problem in context.problems:
        for name, candidate in ENTRIES.items():
            timed = candidate in times_us
            cells = {"problem": problem.id, "name": name, "candidate": candidate.id if timed else "", "unlike": False}
            lineup.append({**cells, "reason": "" if timed else "rule: on purpose", "run_id": "", "condition": ""})
        for candidate, time_us in times_us.items():
            trials.append(
                Trial(
                    stage=FINALS,
                    problem=problem.id,
                    candidate=candidate,
                    status=Status.OK,
                    samples_us=(time_us,) * 3,
                    extra_weight_bytes=4096 if candidate == COPY else 0,
                    shared=problem.rows in shared,
                )
            )
    tables = {"trials": trial_frame(trials, {}), "lineup": pd.DataFrame(lineup, columns=list(LINEUP))}
    return STAGE.run(tables, context)["compared"]


def test_the_fastest_entry_of_each_problem_is_named_and_marked(context: Any) -> None:
    compared = _compared(context, {MM: 10.0, CONVERT: 8.0, COPY: 2.0})
    assert compared[compared["fastest"]]["name"].tolist() == ["torch float32_convert"] * 2, "not the copy"
    text = list(choice_lines(compared))
    assert "tuned is the choice of the tables: torch mm on 2 problems" in text
    fastest = "fastest without more weight memory: torch float32_convert on 2 problems (each: compared.csv, fastest)"
    assert fastest in text
    assert set(text) <= set(context.final_lines)


def test_a_fastest_choice_is_named_tuned_and_not_by_its_second_name(context: Any) -> None:
    compared = _compared(context, {MM: 10.0, CONVERT: 18.0})
    assert compared[compared["fastest"]]["name"].tolist() == ["tuned"] * 2


def test_the_fastest_peer_is_printed_where_it_is_not_the_fastest_library(context: Any) -> None:
    compared = _compared(context, {MM: 10.0, CONVERT: 12.0, OTHER: 9.0})
    assert any(line.startswith("  fastest peer") for line in context.final_lines)
    compared = _compared(context, {MM: 10.0, CONVERT: 12.0})
    assert not any("fastest peer" in line for line in context.final_lines)
    regimes = summarize(compared, [64])
    assert "fastest peer" in set(regimes["name"]), "regimes.csv has both"
    assert any(line.startswith("  fastest peer") for line in lines(compared, regimes, "fastest peer", 80)), "chosen"


def test_times_of_a_shared_machine_are_marked_and_warned_of(context: Any) -> None:
    compared = _compared(context, {MM: 10.0, CONVERT: 8.0}, shared=(8,))
    timed = compared[compared["us"].notna()]
    assert set(timed[timed["M"] == 4]["policy"]) == {"host interleaved"}
    assert set(timed[timed["M"] == 8]["policy"]) == {"host interleaved shared_cpu"}
    assert compared[compared["us"].isna()]["policy"].eq("").all()
    said = "1 of 2 problems was timed while other processes used the CPU (shared_cpu)"
    assert context.warnings == [f"{said}; compare again on an idle machine"]
    assert f"  ~ approximate: {said}" in context.final_lines
    cells = [line.split()[-1] for line in context.final_lines if line.startswith(("  tuned ", "  torch "))]
    assert cells == ["~1.00", "~1.00", "~0.80"]
    (race,) = [line for line in context.final_lines if line.startswith("  M 4 to 8 ") and " of 2" in line]
    assert "~0.80 (0.80) of 2" in race
    page = plot(compared, context.run_dir.parent / "c.html", "a CPU", summarize(compared, [64])).read_text()
    assert f"~ approximate: {said}." in page


def test_times_of_an_idle_machine_have_no_mark(context: Any) -> None:
    compared = _compared(context, {MM: 10.0, CONVERT: 8.0})
    assert shared_line(compared) == ""
    assert not context.warnings
    assert not any("~" in line for line in context.final_lines)


def test_a_comparison_without_a_time_is_unsolved_until_one_is_known(context: Any) -> None:
    context.unsolved.append("of another stage")
    _compared(context, {})
    assert context.unsolved == ["of another stage", *(problem.id for problem in context.problems)]
    assert context.final_lines[0] == "nothing was timed: no entry of 2 problems can run here, for these reasons:"
    assert any(line.endswith(": rule: on purpose (2 problems)") for line in context.final_lines)
    _compared(context, {MM: 10.0})
    assert context.unsolved == ["of another stage"]
