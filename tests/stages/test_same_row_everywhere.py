"""One rule chooses among a table's rows of one key: all places that decide between them keep or use the same row."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.core.data import Device
from gemmpipe.core.schema import RESULT
from gemmpipe.family import Family
from gemmpipe.formats.native import NativeCsv
from gemmpipe.runtime.tables import load_tables
from gemmpipe.search.history import History
from gemmpipe.stages.history import add_table_winners, incumbents_of
from gemmpipe.stages.rows import config_text
from gemmpipe.tables import store
from gemmpipe.tables.merge import Row, RowPreference, rows_by_key
from gemmpipe.tables.unite import TableEntry, unite_tables

MS = (1, 2)
Choices = dict[object, object]
"""M -> the config of the row that wins."""


def _row(m: int, choice: int, us: float, policy: str, device: str | None, baseline_us: float | None) -> Row:
    row: Row = dict.fromkeys(RESULT)
    row |= {"gfx": "sm_90", "cu_num": 132, "M": m, "N": 64, "K": 128, "libtype": "triton", "us": us}
    return {
        **row,
        "config": f'{{"a":{choice}}}',
        "policy": policy or None,
        "device": device,
        "baseline_us": baseline_us,
    }


ROWS = st.lists(
    st.builds(
        _row,
        m=st.sampled_from(MS),
        choice=st.integers(0, 5),
        us=st.sampled_from([5.0, 7.5, 9.0]),
        policy=st.sampled_from(["graph", "host", "graph shared_gpu", "graph cut_short", ""]),
        device=st.sampled_from(["NVIDIA H100", "NVIDIA H200", "NVIDIA H800", None]),
        baseline_us=st.sampled_from([None, 8.0]),
    ),
    min_size=1,
    max_size=7,
)


def _choices(rows: list[Row]) -> Choices:
    return {row["M"]: row["config"] for row in rows}


@given(rows=ROWS)
def test_all_places_choose_the_same_row(
    rows: list[Row], blockscale: Family, h200: Device, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("same_row")
    path = folder / blockscale.csv_name
    path.write_text(store.render(rows, blockscale, ()))
    preference = RowPreference(device=h200.name)
    expected = _choices([best for best, *_ in rows_by_key(rows, blockscale, preference).values()])

    entries = [TableEntry(row=row, extra={}, place=f"{path}:{line}") for line, row in enumerate(rows, 2)]
    assert _choices([e.row for e in unite_tables(entries, blockscale, preference).entries]) == expected, "merge"

    tables = load_tables(blockscale, path)
    found = [tables.find(h200, (m, 64, 128)) for m in MS]
    assert _choices([each[0].row for each in found if each]) == expected, "run time"

    configs = {blockscale.problem((("M", m), ("N", 64), ("K", 128))).id: config for m, config in expected.items()}
    formats = [NativeCsv(file=None, sort=False)]
    incumbents = incumbents_of(blockscale, h200, folder, formats)
    assert {name: config_text(candidate) for name, (candidate,) in incumbents.items()} == configs, "incumbents"

    history = History()
    add_table_winners(history, [path], blockscale, h200)
    winners = {name: known.winner for name, known in history.problems.items() if known.winner}
    assert {name: config_text(winner) for name, winner in winners.items()} == configs, "search"

    facts = {"device": h200.name}
    store.update(
        path, blockscale, [], sort=False, min_improvement_pct=0.0, run_id="r", provenance=facts, warn=lambda text: None
    )
    assert _choices(store.read(path, blockscale)) == expected, "update"


@given(rows=ROWS, order=st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows: list[Row], order: random.Random, blockscale: Family) -> None:
    shuffled = list(rows)
    order.shuffle(shuffled)
    ranked, again = rows_by_key(rows, blockscale), rows_by_key(shuffled, blockscale)
    assert ranked == {key: again[key] for key in ranked}
