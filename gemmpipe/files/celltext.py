"""What the text of a cell is: a plain number, or what a spreadsheet takes for a formula."""

import re

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_LONGEST_NUMBER = 64


def is_number(text: str) -> bool:
    """Whether a text is a decimal number in ASCII, as `1`, `-0.5` and `2e-3`: no `1_000`, `5%`, `inf` or `0x10`."""
    return len(text) <= _LONGEST_NUMBER and _NUMBER.fullmatch(text) is not None


def is_formula(cell: str) -> bool:
    """Whether a spreadsheet takes a cell for a formula: `=`, `+`, `-` or `@` before something else than a number."""
    return cell[:1] in ("=", "+", "-", "@") and any(map(str.isalnum, cell)) and not is_number(cell)
