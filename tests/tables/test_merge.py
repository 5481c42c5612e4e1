"""The kept row of a merge: every rule, one case each."""

import re

import pytest

from gemmpipe.family import Family
from gemmpipe.tables.merge import Row, merge_rows, row_key, used_rows


def _row(**values: object) -> Row:
    row: Row = {"gfx": "sm_90", "cu_num": 132, "M": 1, "N": 2, "K": 3, "libtype": "triton", "us": 10.0, "policy": "p"}
    return {**row, "config": '{"a":1}', **values}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("old", "new", "kept", "reason"),
    [
        ({}, {"libtype": "torch", "us": 9.0}, "new", "10.0 us before, 9.00 us now"),
        ({}, {"libtype": "torch", "us": 10.0}, "old", "10.0 us before, 10.0 us now"),
        ({}, {"libtype": "torch", "us": 9.95}, "old", "1 % required"),
        ({"us": 0.0}, {"libtype": "torch"}, "new", "the old row has no measured time"),
        ({}, {"libtype": "torch", "us": None}, "old", "the new row has no measured time"),
        (
            {"device": "NVIDIA H100"},
            {"device": "NVIDIA H200", "libtype": "torch", "us": 11.0},
            "new",
            "on different devices.*cannot be compared",
        ),
        ({"device": None}, {"device": "NVIDIA H200", "libtype": "torch", "us": 11.0}, "old", "1 % required"),
        ({"policy": ""}, {"libtype": "torch", "us": 11.0}, "new", "different policies.*cannot be compared"),
        ({}, {"libtype": "torch", "us": 9.0, "policy": "p shared_gpu"}, "old", "the new row was timed on a shared GPU"),
        ({"policy": "p shared_gpu"}, {"libtype": "torch", "us": 11.0}, "new", "the old row was timed on a shared GPU"),
        ({}, {"libtype": "torch", "us": 9.0, "policy": "p shared_cpu"}, "old", "the new row was timed on a shared CPU"),
        ({"policy": "p shared_cpu"}, {"libtype": "torch", "us": 11.0}, "new", "the old row was timed on a shared CPU"),
        ({}, {"libtype": "torch", "us": 9.0, "policy": "p cut_short"}, "old", "is from a search that was cut short"),
        ({}, {"libtype": "torch", "us": 11.0, "incumbent_us": 12.0}, "new", "timed against the old choice at 12.0 us"),
    ],
)
def test_rules(old: dict[str, object], new: dict[str, object], kept: str, reason: str, blockscale: Family) -> None:
    before, after = _row(**old), _row(**new)
    rows, (conflict,) = merge_rows([before], [after], blockscale, min_improvement_pct=1.0)
    assert rows == [after if kept == "new" else before]
    assert conflict.kept == kept
    assert str(conflict).startswith(f"sm_90/132 M=1 N=2 K=3: kept the {kept} row: ")
    assert re.search(reason, str(conflict))


def test_the_same_choice_timed_again_is_no_conflict(blockscale: Family) -> None:
    rows, conflicts = merge_rows([_row(note="x")], [_row(us=11.0)], blockscale, min_improvement_pct=1.0)
    assert (rows, conflicts) == ([_row(us=11.0, note="x")], [])


def test_order_and_nothing_lost(blockscale: Family) -> None:
    old = [_row(M=m) for m in (3, 1, 2)]
    rows, conflicts = merge_rows(old, [_row(M=9), _row(M=1, us=5.0)], blockscale, min_improvement_pct=1.0)
    assert [row["M"] for row in rows] == [3, 1, 2, 9]
    assert conflicts == []
    assert rows[1]["us"] == 5.0


def test_twins_in_one_table_keep_the_faster(blockscale: Family) -> None:
    rows, (conflict,) = merge_rows(
        [_row(us=9.0), _row(us=8.0, libtype="torch")], [], blockscale, min_improvement_pct=0.0
    )
    assert rows == [_row(us=8.0, libtype="torch")]
    assert conflict.kept == "new"


def test_of_a_key_the_rows_that_look_ups_use_stay_in_the_order_of_the_file(blockscale: Family) -> None:
    h100, h200 = _row(device="NVIDIA H100", us=20.0), _row(device="NVIDIA H200", us=9.0)
    slow, unnamed = _row(device="NVIDIA H200", us=30.0), _row(us=1.0)
    rows = [slow, _row(M=9), unnamed, h100, _row(M=9, us=4.0), h200, _row(M=5), _row(cu_num=114)]

    def used(rows: list[Row]) -> list[Row]:
        return used_rows(rows, lambda row: row_key(row, blockscale), lambda row: row)

    assert used(rows) == [h100, _row(M=9, us=4.0), h200, _row(M=5), _row(cu_num=114)]
    shared = {**h200, "policy": "p shared_gpu", "us": 1.0}
    assert used([shared, h100]) == [h100], "a full row precedes a provisional one of any device"
