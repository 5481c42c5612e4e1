"""Quantities as text for people: times, bytes, rates, speed-ups and counts, in the unit that fits their size.

Functions take one number in the unit that the argument names, `key_text` any value of a key column, and return `-` for
a missing one (None or NaN).
"""

import math
from collections.abc import Sequence

MISSING = "-"
"""The text of a value that was not measured."""
MIN_SHOWN_S = 0.05
"""Durations have one decimal: less is 0.0."""
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_RATE_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def key_text(value: object) -> str:
    """A cell of a key column as screens show it."""
    return MISSING if value is None or value != value or value == "" else str(value)


def time_text(time_us: float | None) -> str:
    """The time of a call: `5.91 us`, `1.30 ms`, `2.1 s`, `3 min 42 s`."""
    if time_us is None or not math.isfinite(time_us):
        return MISSING
    size = abs(time_us)
    if size == 0:
        return "0 us"
    if size < 0.9995:
        return f"{three_digits(time_us * 1e3)} ns"
    if size < 999.5:
        return f"{three_digits(time_us)} us"
    if size < 999.5e3:
        return f"{three_digits(time_us / 1e3)} ms"
    return duration_text(time_us / 1e6)


def duration_text(seconds: float | None) -> str:
    """The duration of work: `0.2 s`, `47.5 s`, `3 min 42 s`, `2 h 05 min`, `3 d 04 h`."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def rough_duration_text(seconds: float | None) -> str:
    """An estimate of a duration, in steps that it can be trusted to: `8 s`, `50 s`, `4 min`, `1 h 20 min`."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 100:
        step = 1 if seconds < 20 else 5
        return f"{max(1, round(seconds / step) * step)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    tens = round(seconds / 600) * 10
    return f"{tens // 60} h {tens % 60:02d} min"


def rough_range_text(least: float, most: float) -> str:
    """Both ends of an estimate: `15 to 40 s`, `50 s to 2 min`; one if they read the same."""
    low, high = rough_duration_text(least), rough_duration_text(most)
    if low == high:
        return high
    number, _, unit = low.rpartition(" ")
    return f"{number if high.endswith(f' {unit}') and number.isdigit() else low} to {high}"


def bytes_text(number: float | None) -> str:
    """A size in memory or on disk, in powers of 1024: `512 B`, `1.50 MiB`, `139 GiB`."""
    if number is None or not math.isfinite(number):
        return MISSING
    if abs(number) < 1023.5:
        return f"{number:.0f} B"
    power = 1
    while abs(number) >= 1023.5 * 1024**power and power < len(_BYTE_UNITS) - 1:
        power += 1
    return f"{three_digits(number / 1024**power)} {_BYTE_UNITS[power]}"


def flops_text(flops_per_s: float | None) -> str:
    """A rate of floating-point operations: `54.2 TFLOP/s`, `3.10 GFLOP/s`."""
    if flops_per_s is None or not math.isfinite(flops_per_s):
        return MISSING
    for factor, prefix in _RATE_PREFIXES:
        if abs(flops_per_s) >= 0.9995 * factor:
            return f"{three_digits(flops_per_s / factor)} {prefix}FLOP/s"
    return f"{three_digits(flops_per_s)} FLOP/s"


def speedup_text(speedup: float | None) -> str:
    """Old time over new time: `1.77x`, `17.1x`, `171x`; less than 1 is slower."""
    if speedup is None or not math.isfinite(speedup):
        return MISSING
    if speedup < 0.995:
        return f"{speedup:.2f}x" if speedup >= 0.0995 else f"{speedup:.2g}x"
    return f"{three_digits(speedup)}x"


def rough_speedup_text(speedup: float | None) -> str:
    """A speed-up in two digits, as far as times of a busy machine can be trusted: `1.8x`, `17x`, `170x`, `0.94x`."""
    if speedup is None or not math.isfinite(speedup):
        return MISSING
    if speedup < 0.995:
        return speedup_text(speedup)
    if speedup < 9.95:
        return f"{speedup:.1f}x"
    step = 10 ** (math.floor(math.log10(speedup)) - 1)
    return f"{round(speedup / step) * step:,.0f}x"


def percent_text(share: float | None) -> str:
    """A share of 1 in percent: `53 %`, `4.2 %`, `0.35 %`."""
    if share is None or not math.isfinite(share):
        return MISSING
    percent = 100 * share
    digits = 0 if abs(percent) >= 9.95 else 1 if abs(percent) >= 0.995 else 2
    return f"{percent:.{digits}f} %" if percent else "0 %"


def count_text(number: int) -> str:
    """A count with separators: `1,944`."""
    return f"{number:,}"


def ranges_text(numbers: Sequence[int], most: int = 6) -> str:
    """Distinct numbers in ascending order, `1, 2, 4`; of more than `most` the ends alone: `1 to 4,096`."""
    ordered = sorted(set(numbers))
    if len(ordered) > most:
        return f"{ordered[0]:,} to {ordered[-1]:,}"
    return ", ".join(f"{number:,}" for number in ordered)


def three_digits(value: float) -> str:
    """Three significant digits without an exponent: `5.91`, `59.1`, `591`, `5,910`."""
    size = abs(value)
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:,.{digits}f}"
