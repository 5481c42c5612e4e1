"""Mutations of files: bytes, lines, cells and JSON values exchanged for what has broken readers before."""

import copy
import json
import random
import re
from collections.abc import Callable

Mutation = Callable[[bytes, random.Random], bytes]

NUMBERS = (
    *("0", "-1", "-64", "1", "65537", "2147483648", "-9223372036854775809", "1e3", "1e999", "-1e-999", "0.5", "-0.5"),
    *("inf", "-inf", "nan", "NaN", "Infinity", "5%", "101%", "1_000", "1_0.5", "0x10", "1e", ".", "+", "--1", "7.0"),
    *("\uff11\uff12", "\u0663", "\u00b2", "9" * 60, "9" * 400, "9" * 5000, "1" + "0" * 30, "true", "False", "null"),
)
TEXTS = (
    *("", " ", "\x00", "\x1b]0;x\x07", "\u2028", "\u202e", "\ufeff", '"', "'", ",", ";", "\t", "\\", "\r", "/dev/zero"),
    *("=cmd|' /C calc'!A0", "+1+x", "-x()", "@SUM(A1)", "../../../../x", "${oc.env:HOME}", "_target_", "<x>", "%s%n"),
    *("fp8", "torch.bfloat16", "x" * 300, "y" * 70_000, "[" * 3000, "{" * 3000, "(" * 500, "a" * 30 + "!", "*" * 200),
)
VALUES = (
    *(None, True, False, 0, 1, -1, -64, 65537, 2**31, 2**63, 10**30, 0.5, -0.5, 1e308, "", "x", "1", "\u0663"),
    *([], {}, [[]], [1], [0, 0], [None], {"": {}}, {"a": [1]}, [1] * 3000, "9" * 4000, "=1+x", [[1, 2], [3]], [{}]),
)
"""JSON values; those of every kind stand where another one is expected."""


def bytewise(raw: bytes, rng: random.Random) -> bytes:
    """A few bytes inserted, removed or overwritten, or the end cut off."""
    if rng.random() < 0.1:
        return raw[: rng.randrange(len(raw) + 1)]
    for _ in range(rng.randint(1, 4)):
        place, cut = rng.randrange(len(raw) + 1), rng.randrange(8)
        raw = raw[:place] + rng.randbytes(rng.randrange(6)) + raw[place + cut :]
    return raw


def linewise(raw: bytes, rng: random.Random) -> bytes:
    """A line repeated, removed, put elsewhere, or one without its line break."""
    lines = raw.splitlines(keepends=True) or [b""]
    place = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            lines[place:place] = [lines[place]] * rng.choice((1, 2, 50))
        case 1:
            del lines[place]
        case 2:
            lines.insert(rng.randrange(len(lines)), lines.pop(place))
        case _:
            lines[place] = lines[place].rstrip(b"\r\n")
    return b"".join(lines)


def wordwise(raw: bytes, rng: random.Random) -> bytes:
    """A few words or numbers exchanged for hostile ones."""
    for _ in range(rng.randint(1, 3)):
        arguments = list(re.finditer(rb"[\w.%+-]+", raw))
        if not arguments:
            return rng.choice(TEXTS).encode()
        word = rng.choice(arguments)
        new = rng.choice(NUMBERS if rng.random() < 0.6 else TEXTS)
        raw = raw[: word.start()] + new.encode(errors="surrogatepass") + raw[word.end() :]
    return raw


def cellwise(raw: bytes, rng: random.Random) -> bytes:
    """A few cells of a CSV exchanged for hostile ones, or a column repeated."""
    lines = [line.split(b",") for line in raw.split(b"\n")]
    if rng.random() < 0.1:
        place = rng.randrange(len(lines[0]))
        return b"\n".join(b",".join([*cells, *cells[place : place + 1]]) for cells in lines)
    for _ in range(rng.randint(1, 3)):
        cells = rng.choice(lines)
        cells[rng.randrange(len(cells))] = rng.choice(NUMBERS if rng.random() < 0.7 else TEXTS).encode()
    return b"\n".join(b",".join(cells) for cells in lines)


def valuewise(raw: bytes, rng: random.Random) -> bytes:
    """A few values or names of a JSON text exchanged; a text that is none is mutated by its words."""
    try:
        tree = json.loads(raw)
        holder = [tree]
        for _ in range(rng.randint(1, 3)):
            _exchange(holder, rng)
        return json.dumps(holder[0]).encode()
    except (ValueError, RecursionError):
        return wordwise(raw, rng)


def linewise_values(raw: bytes, rng: random.Random) -> bytes:
    """The same in one line of a file of JSON lines."""
    lines = raw.splitlines() or [b""]
    place = rng.randrange(len(lines))
    lines[place] = valuewise(lines[place], rng)
    return b"\n".join(lines) + b"\n"


def _exchange(holder: "list[object]", rng: random.Random) -> None:
    """Exchange one value somewhere below, or the name of one."""
    node: object = holder
    while True:
        places = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        place = rng.choice(places)
        inner = node[place]  # type: ignore[index]
        if isinstance(inner, dict | list) and inner and (node is holder or rng.random() < 0.85):
            node = inner
            continue
        if isinstance(node, dict) and rng.random() < 0.15:
            node[rng.choice((*TEXTS, *NUMBERS))] = node.pop(place)
        else:
            new = rng.choice((*VALUES, rng.choice(NUMBERS), rng.choice(TEXTS)))
            node[place] = copy.deepcopy(new)  # type: ignore[index]
        return
