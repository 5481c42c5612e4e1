"""Untrusted JSON: invalid files are refused with one line."""

from pathlib import Path

import pytest

from gemmpipe.core.errors import UserError
from gemmpipe.core.files import read_object


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"{", "x.json:1:2: no JSON"),
        (b"[1]", "a JSON list, expected an object"),
        (b'{"a": 1, "a": 2}', "duplicate name 'a'"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b"\xff\xfe{}", "not text in UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "nested more than"),
        (b" " * 1_000_001, "larger than 1,000,000 bytes"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number of 5,000 digits, expected at most 1000"),
        (b"null", "a JSON null, expected an object"),
    ],
)
def test_refused(raw: bytes, line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=line) as caught:
        read_object(path)
    assert "\n" not in str(caught.value)


def test_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": {"]": "\\"}"}}')
    assert read_object(path) == {"a": {"]": '"}'}}
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_object(tmp_path / "y.json")
