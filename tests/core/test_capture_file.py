"""Files of captured products: every line is a row or a bad row, whatever its bytes."""

from codecs import BOM_UTF8
from contextlib import suppress
from pathlib import Path
from string import whitespace

from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.core.capture_file import MAX_COUNT, read_captures
from gemmpipe.core.errors import UserError

_LINE = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(
        [b"a16w16,8,5", b"a16w16,8," + b"9" * 5000, b'"a,8,1', b"a,8,1_0", b"a,8,+1", b"x" * 120_000, b"a\r,8,1"]
    ),
)


@given(lines=st.lists(_LINE, max_size=8))
def test_any_bytes_are_rows_or_bad_rows(lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_bytes(b"family,M,count\n" + b"".join(line + b"\n" for line in lines))
    found = read_captures(path)
    assert len(found.rows) >= lines.count(b"a16w16,8,5")
    assert all(1 <= row.count <= MAX_COUNT and set(row.cells) == {"family", "M"} for row in found.rows)
    assert sum(b"9" * 5000 in line for line in lines) == sum(
        "column count: '999" in bad.reason for bad in found.bad_rows
    )
    for bad in found.bad_rows:
        assert bad.text.strip(whitespace)
        assert "\n" not in bad.text


@given(raw=st.binary(max_size=60))
def test_any_file_is_read_or_refused(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_bytes(raw)
    with suppress(UserError):
        found = read_captures(path)
        assert {"family", "count"} <= set(found.header) or not raw.removeprefix(BOM_UTF8).strip()
