"""One product of a run as text: candidates that need more memory for the weight say so."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_runs import write_manifest, write_recorded_run

from gemmpipe.core.data import Candidate, Status, Trial, canonical_json
from gemmpipe.report.reading import read_run
from gemmpipe.report.results import DIRECT, PADDED
from gemmpipe.report.show_product import ShownProduct, _columns, find_product, product_lines
from gemmpipe.report.trial_frame import memory_reason

CONVERT = Candidate.of("torch", {"method": "float32_convert"})
COPY = Candidate.of("torch", {"method": "bfloat16_copy"})


def trial(candidate: Candidate, us: float, extra_bytes: int) -> Trial:
    return Trial(
        stage="bench",
        problem="k M=1",
        candidate=candidate,
        status=Status.OK,
        samples_us=(us,),
        launches=1,
        extra_weight_bytes=extra_bytes,
    )


def shown(chosen: Candidate) -> ShownProduct:
    row = {"libtype": chosen.backend, "config": canonical_json(chosen.knobs)}
    data: Any = SimpleNamespace()
    return ShownProduct(data=data, problem="k M=1", row=row, trials=None)


@pytest.mark.parametrize(("extra", "printed"), [(20 << 20, True), (0, False)])
def test_faster_candidates_with_a_copy_of_the_weight_say_why_they_are_not_chosen(extra: int, printed: bool) -> None:
    trials = [trial(COPY, 1.0, extra), trial(CONVERT, 30.0, 0)]
    found = {column.title: column.cells for column in _columns(trials, shown(CONVERT))}
    assert found[""] == ("", "*")
    assert found.get("weight memory") == (("+20.0 MiB", "") if printed else None)
    text = (
        "1 faster finalist: 1.00 us with +20.0 MiB for the weight, more than stages.select.max_extra_weight_pct allows"
    )
    assert memory_reason(trials, shown(CONVERT).row) == (text if printed else "")
    assert memory_reason(trials, shown(COPY).row) == ""
    stopped = replace(trials[0], status=Status.PRUNED)
    assert memory_reason([stopped, trials[1]], shown(CONVERT).row) == "", "one that was stopped early has not won"


def test_a_product_timed_at_both_clocks_shows_the_time_at_full_clocks() -> None:
    trials = [replace(trial(COPY, 12.0, 0), full_clocks_us=11.0), trial(CONVERT, 30.0, 0)]
    assert {c.title: c.cells for c in _columns(trials, shown(COPY))}["full clocks"] == ("11.0 us", "")
    assert "full clocks" not in {c.title for c in _columns(trials[1:], shown(CONVERT))}


def test_why_a_faster_candidate_is_not_the_choice_is_said_whole_at_80_columns(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1)
    write_manifest(tmp_path)
    data = read_run(tmp_path)
    finals = sorted((each for each in data.trials if each.trial.stage == "bench"), key=lambda e: e.trial.time_us or 0)
    copy = replace(finals[0], trial=replace(finals[0].trial, extra_weight_bytes=12 << 20))
    chosen = finals[1].trial.candidate
    products = data.products.assign(libtype=chosen.backend, config=canonical_json(chosen.knobs))
    trials = [copy if each is finals[0] else each for each in data.trials]
    found = find_product(replace(data, trials=trials, products=products), {})
    lines = list(product_lines(found, 80, 5))
    assert all(len(line) <= 80 for line in lines)
    assert memory_reason([copy.trial, finals[1].trial], found.row) in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("library", [PADDED, DIRECT])
def test_a_library_that_pads_rows_is_told(library: str, tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1)
    write_manifest(tmp_path)
    data = read_run(tmp_path)
    found = find_product(replace(data, products=data.products.assign(library=library)), {})
    assert ("it pads M" in " ".join(product_lines(found, 80, 5))) == (library == PADDED)


def test_the_finals_say_which_left_early_and_what_the_knobs_are(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1, candidates=40)
    data = read_run(tmp_path)
    product = find_product(data, {"m": str(data.products["rows"][0])})
    lines = list(product_lines(product, 80, 5))
    knobs = json.loads(product.row["config"])  # type: ignore[index]
    assert {"GROUP_SIZE_M", "num_warps"} <= set(knobs)
    legend = " ".join(" ".join(lines[2:6]).split())
    assert "(BLOCK_SIZE_M x N x K, g GROUP_SIZE_M, " in legend
    assert ", w num_warps, " in legend
    assert product.trials is not None
    finals = product.trials.finals
    early = replace(finals[0], trial=replace(finals[0].trial, status=Status.PRUNED))
    pruned = replace(product, trials=replace(product.trials, finals=[early, *finals[1:]]))
    printed = f"finals: {len(finals)} candidates"
    assert printed in lines
    assert f"{printed}; the last 1 left the race early" in product_lines(pruned, 80, 5)
