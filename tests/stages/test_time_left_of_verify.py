"""The time left that `verify` states, on a recorded run: 136 rows of a table in two batches (H200, 2026-11-26).

The record has each row's time and finalists, and the ends of the finals and of the calls.
"""

import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from recorded_run import H200, TIMER

from gemmpipe.core.data import Candidate
from gemmpipe.core.events import Event
from gemmpipe.family import load_family
from gemmpipe.report.progress import RunProgress
from gemmpipe.stages.finals_cost import FinalsCost
from gemmpipe.stages.finals_work import FinalsWork
from gemmpipe.stages.verify_calls import VerifyCalls

RECORD = Path(__file__).parents[1] / "data" / "h200_verify_136.jsonl.xz"
BATCHES = (96, 40)
FAMILY = load_family("a8w8_blockscale")
CALLS = VerifyCalls(err_ratio=0.05, timer=TIMER)


class _Run:
    def __init__(self) -> None:
        rows = [json.loads(line) for line in lzma.decompress(RECORD.read_bytes()).decode().splitlines()]
        self.head, self.rows, self.end = rows[0], rows[1:-1], float(rows[-1]["t"])
        self.problems = [FAMILY.problem(tuple(key.items())) for key in self.head["problems"]]

    def calls_s(self, places: Sequence[int], *, timed: bool = True) -> float:
        """The expected seconds of calls, by the times of the finals or by the products alone."""
        times = self.head["us"] if timed else [None] * len(self.problems)
        return sum(CALLS.cost(self.problems[i], FAMILY, H200).call_s(times[i]) for i in places)

    def finals(self, places: Sequence[int]) -> tuple[FinalsWork, dict[str, list[Candidate]]]:
        """The work of the finals and their open finalists: the row, and libraries."""
        rows: dict[str, list[Any]] = {}
        for i in places:
            candidates = [Candidate.of("triton", {"place": place}) for place in range(self.head["finalists"][i])]
            roles = ["incumbent"] + ["library"] * (len(candidates) - 1)
            pairs = zip(candidates, roles, strict=True)
            rows[self.problems[i].id] = [{"candidate": c.id, "us": None, "role": r, "own": c} for c, r in pairs]
        costs = {
            p.id: FinalsCost(family=FAMILY, spec=FAMILY.spec(p), timer=TIMER, device=H200, all_rounds=True)
            for p in (self.problems[i] for i in places)
        }
        pending = {name: [row["own"] for row in these] for name, these in rows.items()}
        recorded = {self.problems[i].id: self.head["us"][i] for i in places}
        return FinalsWork(cast(Any, rows), pending, costs, recorded), pending

    def events(self) -> Iterator[tuple[float, Event]]:
        """As the stages emit them."""
        ends, now, calls_s = iter(self.rows), float(self.head["begins"]), 0.0
        for number, size in enumerate(BATCHES):
            later = 0.0 if number else BATCHES[1] / size
            finals, calls = ([next(ends) for _ in range(size)] for _ in range(2))
            places = [row["done"] for row in finals]
            rest_s = calls_s * size / BATCHES[0] if number else self.calls_s(places, timed=False)
            yield now, Event(kind="step", text="bench", done=3, total=5, rest_s=rest_s, later=later)
            work, pending = self.finals(places)
            yield now, Event(kind="stage", text="bench", total=size, unit="problems", expected_s=work.total_s)
            for row in finals:
                del pending[self.problems[row["done"]].id]
                yield row["t"], Event(kind="progress", done=size - len(pending), share=work.share(pending))
            now = finals[-1]["t"]
            yield now, Event(kind="step", text="called", done=4, total=5, later=later)
            expected_s = self.calls_s(places)
            yield now, Event(kind="stage", text="called", total=size, unit="problems", expected_s=expected_s)
            for done, row in enumerate(calls, start=1):
                places.remove(row["done"])
                yield row["t"], Event(kind="progress", done=done, share=1 - self.calls_s(places) / expected_s)
            calls_s, now = calls[-1]["t"] - now, calls[-1]["t"]


def test_from_a_quarter_on_the_time_left_is_known_in_each_batch() -> None:
    run, progress, stated = _Run(), RunProgress(0.0), 0
    for now, event in run.events():
        progress.take(event, now)
        true_s = run.end - now
        if event.kind != "progress" or now < run.end / 4 or true_s < 4:
            continue
        assert progress.left_s(now) == pytest.approx(true_s, rel=0.2), now
        stated += 1
    assert stated > 150


def test_the_calls_are_known_before_the_first() -> None:
    """Those of a row in both memory orders take 0.14 s, of one with a large weight more than of one with a small."""
    run = _Run()
    places = [row["done"] for row in run.rows[: BATCHES[0]]]
    took_s = run.rows[2 * BATCHES[0] - 1]["t"] - run.rows[BATCHES[0] - 1]["t"]
    assert run.calls_s(places) == pytest.approx(took_s, rel=0.1)
    assert run.calls_s(places, timed=False) == pytest.approx(took_s, rel=0.2)


def test_a_row_in_one_order_takes_half_the_time_of_one_in_both() -> None:
    """a16w16 was expected to take as long as a block-scaled product, 0.13 s a row instead of 0.09."""
    key = {"M": 64, "N": 4096, "K": 4096}
    found = {}
    for name in ("a16w16", "a8w8_blockscale"):
        family = load_family(name)
        problem = family.problem(tuple((c.name, key.get(c.name, c.default)) for c in family.key_columns))
        found[name] = CALLS.cost(problem, family, H200).call_s(10.0)
    assert found["a16w16"] == pytest.approx(found["a8w8_blockscale"] / 2, rel=0.1)
