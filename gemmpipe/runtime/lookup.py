"""Which M's rows of a tuned table may answer for a problem, in the order in which they are asked."""

EXACT_M = 64
"""Up to so many rows a row of its own is worth tuning: beyond, padding changes little and the padded M serves many."""


def finely_padded(m: int) -> int:
    """M rounded up to a multiple of 16 (M <= 256), 32 (<= 1024), 64 (<= 4096) or 128."""
    step = 16 if m <= 256 else 32 if m <= 1024 else 64 if m <= 4096 else 128
    return -(-m // step) * step


def coarsely_padded(m: int, n: int) -> int:
    """The next power of two; 8192 when M > 8192 and N > 4096, since nothing is tuned beyond."""
    if m > 8192 and n > 4096:
        return 8192
    return 1 << (m - 1).bit_length()


def levels(m: int, n: int) -> dict[int, str]:
    """Each M to ask for once, with the name of its step: `exact`, then `padded`, finely before coarsely."""
    found = {m: "exact"}
    for padded in (finely_padded(m), coarsely_padded(m, n)):
        found.setdefault(padded, "padded")
    return found
