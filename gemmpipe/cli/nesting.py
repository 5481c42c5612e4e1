"""How deep brackets stand in a text: parsers of YAML and of Hydra's words take seconds, or recurse without end."""

import re

MOST_DEEP = 32
"""Values within values; no option has more than a few."""
_MOST_OPEN = 2 * MOST_DEEP  # those in quotes are counted too
_BRACKET = re.compile(r"[\[\]{}]")


def is_too_deep(text: str) -> bool:
    """Whether more brackets are open at a time than any value has."""
    depth = 0
    for mark in _BRACKET.findall(text):
        depth = depth + 1 if mark in "[{" else max(0, depth - 1)
        if depth > _MOST_OPEN:
            return True
    return False
