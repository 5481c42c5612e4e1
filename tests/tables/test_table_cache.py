"""Tables are parsed once per state of their file, also with several threads, and again after every change."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import write_atomic
from gemmpipe.family import Family
from gemmpipe.runtime.tables import load_tables
from gemmpipe.tables import store
from gemmpipe.tables.table_cache import TableCache

HEADER = "gfx,cu_num,M,N,K,libtype,us\n"
HOUR_NS = 3600 * 10**9
Cache = TableCache[store.ParsedTable]


@pytest.fixture
def cache() -> Cache:
    return TableCache(parse=store._parse, row_count=lambda sheet: len(sheet.rows))


@pytest.fixture
def path(tmp_path: Path, blockscale: Family) -> Path:
    found = tmp_path / blockscale.csv_name
    _write(found, "1.5")
    return found


def _write(path: Path, us: str, *, rows: int = 1) -> None:
    """A table of the past: one written just now would be read twice."""
    path.write_text(HEADER + "".join(f"sm_90,132,{m},64,128,torch,{us}\n" for m in range(1, rows + 1)))
    _age(path)


def _age(path: Path, hours: int = 1) -> None:
    at_ns = time.time_ns() - hours * HOUR_NS
    os.utime(path, ns=(at_ns, at_ns))


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The clock is a minute ahead: the time of change (ctime), which a test cannot set, is old enough."""
    now = time.time_ns
    monkeypatch.setattr("gemmpipe.tables.table_cache.time.time_ns", lambda: now() + 60 * 10**9)
    return


def test_a_table_is_read_once(cache: Cache, path: Path, blockscale: Family) -> None:
    first = cache.read(path, blockscale)
    assert cache.read(path, replace(blockscale, module="again")) is first, "the same family, loaded again"
    assert cache.reads == 1
    assert [row["us"] for row in first.rows] == [1.5]


def test_another_family_is_read_anew(cache: Cache, path: Path, blockscale: Family) -> None:
    cache.read(path, blockscale)
    cache.read(path, replace(blockscale, key_columns=blockscale.key_columns[:3], name="other"))
    assert cache.reads == 2


@pytest.mark.parametrize("us", ["2.5", "12.5"])
def test_a_file_replaced_by_another_process(cache: Cache, path: Path, blockscale: Family, us: str) -> None:
    cache.read(path, blockscale)
    before = path.stat()
    write_atomic(path, path.read_text().replace("1.5", us))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps times
    assert [row["us"] for row in cache.read(path, blockscale).rows] == [float(us)]


def test_a_row_changed_in_place_within_a_tick(cache: Cache, path: Path, blockscale: Family) -> None:
    cache.read(path, blockscale)
    before = path.stat()
    path.write_text(path.read_text().replace("1.5", "12.5"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_ino == before.st_ino
    assert [row["us"] for row in cache.read(path, blockscale).rows] == [12.5], "another size"


def test_a_row_changed_in_place_with_the_same_size(cache: Cache, path: Path, blockscale: Family) -> None:
    cache.read(path, blockscale)
    path.write_text(path.read_text().replace("1.5", "2.5"))
    assert [row["us"] for row in cache.read(path, blockscale).rows] == [2.5], "another time"


def test_a_file_written_just_now_may_change_again_in_its_tick(
    cache: Cache, path: Path, blockscale: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmpipe.tables.table_cache.time.time_ns", lambda: path.stat().st_ctime_ns + 1)
    assert cache.read(path, blockscale) is not cache.read(path, blockscale)
    assert cache.reads == 2


def test_a_file_that_changes_while_it_is_read_is_not_kept(path: Path, blockscale: Family) -> None:
    def parse(path: Path, family: Family) -> store.ParsedTable:
        found = store._parse(path, family)
        if not changed:
            changed.append(True)
            _write(path, "22.5")
        return found

    changed: list[bool] = []
    cache = TableCache(parse=parse, row_count=lambda sheet: len(sheet.rows))
    assert [row["us"] for row in cache.read(path, blockscale).rows] == [1.5]
    assert [row["us"] for row in cache.read(path, blockscale).rows] == [22.5]


def test_errors_are_not_kept(cache: Cache, path: Path, blockscale: Family) -> None:
    _write(path, "x")
    for _ in range(2):
        with pytest.raises(UserError, match="column us: 'x'"):
            cache.read(path, blockscale)
    _write(path, "3.5")
    assert [row["us"] for row in cache.read(path, blockscale).rows] == [3.5]
    path.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        cache.read(path, blockscale)


def test_the_number_of_tables_and_rows_is_bounded(tmp_path: Path, blockscale: Family) -> None:
    cache = TableCache(parse=store._parse, row_count=lambda sheet: len(sheet.rows), max_tables=2, max_rows=9)
    paths = [tmp_path / f"{i}.csv" for i in range(4)]
    for each, rows in zip(paths, (4, 4, 4, 10), strict=True):
        _write(each, "1.5", rows=rows)
    first, second, third, large = paths
    cache.read(first, blockscale)
    cache.read(second, blockscale)
    cache.read(first, blockscale)
    cache.read(third, blockscale)  # in place of the second, which was used before the first
    assert cache.reads == 3
    cache.read(first, blockscale)
    assert cache.reads == 3
    cache.read(second, blockscale)
    assert cache.reads == 4
    for _ in range(2):
        assert len(cache.read(large, blockscale).rows) == 10
    assert cache.reads == 6, "more rows than may be kept"


def test_threads_read_what_is_in_the_file(cache: Cache, path: Path, blockscale: Family) -> None:
    """Readers never see a value that was replaced before they began."""
    written = threading.Event()
    values = [1.5]

    def reader() -> None:
        while not written.is_set():
            least = values[-1]
            [row] = cache.read(path, blockscale).rows
            assert isinstance(row["us"], float)
            assert row["us"] >= least

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(reader) for _ in range(4)]
        for step in range(2, 40):
            write_atomic(path, f"{HEADER}sm_90,132,1,64,128,torch,{step}.5\n")
            values.append(step + 0.5)
        written.set()
        for future in futures:
            future.result()


def test_an_update_and_readers_share_the_table_but_no_row(path: Path, blockscale: Family) -> None:
    before = store.read(path, blockscale)
    reads = store.TABLES.reads
    tables = load_tables(blockscale, path)
    assert [each.row for rows in tables.rows.values() for each in rows] == before
    new = {**before[0], "us": 1.0, "libtype": "triton", "config": "{}", "policy": "p"}
    store.update(
        path, blockscale, [new], sort=False, min_improvement_pct=0.0, run_id="r", provenance={}, warn=lambda text: None
    )
    assert store.TABLES.reads == reads, "read once for all three"
    assert before[0]["us"] == 1.5
    assert "device" not in before[0], "filled in a copy"
    assert [row["us"] for row in store.read(path, blockscale)] == [1.0]
