"""Uniting tables of equal rank: the kept row of each key in any order of input, and the reported reasons."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from executed_lines import grows_linearly
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmpipe.core.schema import RESULT
from gemmpipe.family import Family
from gemmpipe.tables import store
from gemmpipe.tables.merge import Row, RowPreference, row_key
from gemmpipe.tables.unite import DroppedRow, TableEntry, UnitedTable, entries_of, unite_tables

STALE = "old@00000000"
PREFERENCE = RowPreference(
    device=None, is_stale=lambda row: row.get("kernelName") == STALE and row.get("libtype") is not None
)
"""As for real rows, a row without a library counts as current."""


def _entry(place: str = "a.csv:2", extra: Row | None = None, **values: object) -> TableEntry:
    row: dict[str, object] = dict.fromkeys(RESULT)
    row |= {"gfx": "sm_90", "cu_num": 132, "M": 1, "N": 2, "K": 3, "libtype": "triton", "us": 10.0}
    row |= {"config": '{"a":1}', "policy": "p", "device": "NVIDIA H200", **values}
    return TableEntry(row=row, extra=extra or {}, place=place)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("worse", "better", "reason"),
    [
        ({"us": 11.0}, {}, "slower under the same policy"),
        ({"us": 0.0}, {"us": 99.0}, "us is 0.0: not a measured time"),
        ({"us": None}, {"us": 99.0, "policy": "p shared_gpu"}, "us is None"),
        (
            {"us": 1.0, "policy": "p shared_gpu"},
            {"kernelName": STALE},
            "provisional ('p shared_gpu'), the other row was timed alone and in full",
        ),
        (
            {"us": 1.0, "policy": "p shared_gpu"},
            {"policy": None},
            "provisional ('p shared_gpu'), the other row does not say how it was timed",
        ),
        (
            {"us": 1.0, "kernelName": STALE},
            {"kernelName": "x@1"},
            "its kernel's source 00000000 has changed",
        ),
        (
            {"us": 1.0, "device": "NVIDIA H100"},
            {},
            "timed on NVIDIA H100 and NVIDIA H200, with the same gfx and cu_num",
        ),
        ({"us": 1.0, "device": None}, {}, "no device, the other row has one"),
        ({"us": 1.0, "policy": None}, {}, "different policies ('unknown' and 'p'): the times cannot be compared"),
        ({"us": 1.0, "policy": "o"}, {}, "different policies ('o' and 'p')"),
        ({"us": 1.0, "policy": "p sustained dependent"}, {"policy": "p both_clocks dependent"}, "different policies"),
        ({"us": 1.0, "policy": "p sustained dependent"}, {"policy": "p both_clocks"}, "different policies"),
        ({"us": 1.0, "policy": "p separate dependent"}, {"policy": "p separate sustained"}, "different policies"),
        ({"us": 1.0, "policy": "p separate"}, {"policy": "p dependent"}, "different policies"),
        ({"baseline_us": None}, {"baseline_us": 12.0}, "the same time; fewer filled cells"),
        ({"libtype": "gluon"}, {"libtype": "triton"}, "the same time; the last in the order of texts"),
    ],
)
def test_rules(worse: dict[str, object], better: dict[str, object], reason: str, blockscale: Family) -> None:
    left, kept = _entry("a.csv:2", **worse), _entry("b.csv:2", **better)
    for order in ([left, kept], [kept, left]):
        union = unite_tables(order, blockscale, PREFERENCE)
        assert union.entries == [kept]
        (conflict,) = union.conflicts
        assert reason in conflict.reason
        assert str(conflict).startswith("sm_90/132 M=1 N=2 K=3: kept b.csv:2 (")


def test_the_user_names_the_product_to_keep(blockscale: Family) -> None:
    h100, h200 = _entry("a.csv:2", device="NVIDIA H100", us=99.0), _entry("b.csv:2")
    preference = RowPreference(device="NVIDIA H100", is_stale=PREFERENCE.is_stale)
    assert unite_tables([h200, h100], blockscale, preference).entries == [h100]


def test_versions_that_differ_are_named(blockscale: Family) -> None:
    runs = {"r1": {"versions": {"triton": "3.6.0", "torch": "2.11"}}, "r2": {"versions": {"triton": "3.9.0"}}}
    union = unite_tables([_entry(run_id="r1"), _entry(run_id="r2", us=9.0)], blockscale, PREFERENCE.with_runs(runs))
    assert union.conflicts[0].reason == "slower under the same policy (triton 3.6.0 and 3.9.0)"


def test_one_row_with_the_foreign_columns_of_all_duplicates(blockscale: Family) -> None:
    twins = [_entry("a.csv:2", {"_tag": "x"}), _entry("b.csv:2", {"note": "y"}), _entry("c.csv:2", {"_tag": None})]
    union = unite_tables(twins, blockscale, PREFERENCE)
    assert (union.duplicates, union.conflicts) == (2, [])
    assert [dict(entry.extra) for entry in union.entries] == [{"_tag": "x", "note": "y"}]


_ENTRIES = st.lists(
    st.builds(
        _entry,
        place=st.integers(2, 999).map("t.csv:{}".format),
        extra=st.dictionaries(st.sampled_from(["_tag", "note"]), st.sampled_from(["x", "y", None])),
        M=st.integers(1, 2),
        cu_num=st.sampled_from([132, 304]),
        libtype=st.sampled_from(["triton", "torch", None]),
        us=st.sampled_from([None, 0.0, -1.0, 1.0, 2.0]),
        policy=st.sampled_from([None, "p", "q", "p shared_gpu"]),
        device=st.sampled_from([None, "NVIDIA H100", "NVIDIA H200"]),
        kernelName=st.sampled_from([None, "torch", STALE, "new@11111111"]),
        run_id=st.sampled_from(["r1", "r2"]),
    ),
    max_size=8,
)


def _said(union: UnitedTable) -> list[tuple[Row, dict[str, object]]]:
    return [(e.row, {k: v for k, v in e.extra.items() if v is not None}) for e in union.entries]


def test_the_rank_of_a_row_does_not_depend_on_other_rows(blockscale: Family) -> None:
    """Regression: a third row with another hash changed the rank of the first two."""
    stale = _entry("a.csv:2", kernelName=STALE)
    untold = _entry("b.csv:2", kernelName=STALE, libtype=None, policy=None)
    untimed = _entry("c.csv:2", kernelName=None, us=None)
    first = unite_tables([stale, untimed], blockscale, PREFERENCE).entries
    assert unite_tables([*first, untold], blockscale, PREFERENCE).entries == [untold]
    assert unite_tables([stale, untimed, untold], blockscale, PREFERENCE).entries == [untold]


@given(_ENTRIES, st.randoms())
@settings(max_examples=300)
def test_any_order_and_any_grouping_end_alike(blockscale: Family, entries: list[TableEntry], random: object) -> None:
    whole = _said(unite_tables(entries, blockscale, PREFERENCE))
    shuffled = list(entries)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert _said(unite_tables(shuffled, blockscale, PREFERENCE)) == whole
    for cut in range(len(entries) + 1):
        parts = [unite_tables(part, blockscale, PREFERENCE).entries for part in (entries[:cut], entries[cut:])]
        assert _said(unite_tables([*parts[0], *parts[1]], blockscale, PREFERENCE)) == whole
    again = unite_tables([*unite_tables(entries, blockscale, PREFERENCE).entries, *entries], blockscale, PREFERENCE)
    assert _said(again) == whole


@given(_ENTRIES)
@settings(max_examples=200)
def test_every_row_is_kept_a_duplicate_or_explained(blockscale: Family, entries: list[TableEntry]) -> None:
    union = unite_tables(entries, blockscale, PREFERENCE)
    assert len(entries) == len(union.entries) + union.duplicates + len(union.conflicts)
    assert [row_key(e.row, blockscale) for e in union.entries] == list(
        dict.fromkeys(row_key(e.row, blockscale) for e in union.entries)
    )
    for conflict in union.conflicts:
        assert _no_worse(conflict)


def _no_worse(conflict: DroppedRow) -> bool:
    """Properties of the report that do not depend on how ranks are computed."""
    kept, left = conflict.kept.row, conflict.dropped.row
    provisional = ["shared_gpu" in str(row["policy"]) for row in (kept, left)]
    if store.is_timed(left):
        assert store.is_timed(kept), "a row without a time never displaces one with"
        assert not (provisional[0] and not provisional[1]), "a provisional row never displaces one timed alone"
    # One of two library types may have the hash of a kernel that has changed since, and the other no kernel.
    same = all(kept[name] == left[name] for name in ("policy", "device", "libtype", "kernelName"))
    if same and store.is_timed(kept) and store.is_timed(left):
        assert kept["us"] <= left["us"]  # type: ignore[operator]
    return True


def test_uniting_grows_with_the_rows_of_the_tables(tmp_path: Path, sixteen: Family) -> None:
    def union(count: int) -> Callable[[], None]:
        paths = [tmp_path / f"{count}{name}.csv" for name in "ab"]
        for path, cycle in zip(paths, (7, 5), strict=True):
            path.write_text(store.render([_row16(m, 5.0 + m % cycle) for m in range(count)], sixteen, ()))

        def unite_them() -> None:
            entries = [e for p in paths for e in entries_of(p, sixteen, store.parse_table(p, sixteen), {})]
            union = unite_tables(entries, sixteen, PREFERENCE)
            store.render([{**e.row, **e.extra} for e in union.entries], sixteen, ())
            assert len(union.entries) == count

        return unite_them

    grows_linearly(union, 500)


def _row16(m: int, us: float) -> Row:
    key = {"bias": False, "dtype": "bfloat16", "outdtype": "bfloat16", "scaleAB": False, "bpreshuffle": False}
    return {**_entry(M=m + 1, us=us).row, **key}


def test_products_are_sorted_by_name_and_sizes_by_number(blockscale: Family) -> None:
    places = list(itertools.product(["sm_90", "gfx942"], [9, 10, 100]))
    union = unite_tables([_entry(gfx=gfx, M=m) for gfx, m in places], blockscale, PREFERENCE)
    assert [(e.row["gfx"], e.row["M"]) for e in union.entries] == [
        ("gfx942", 9),
        ("gfx942", 10),
        ("gfx942", 100),
        ("sm_90", 9),
        ("sm_90", 10),
        ("sm_90", 100),
    ]
