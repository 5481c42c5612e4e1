"""A comparison of two sides as text: lines for a terminal, Markdown, JSON."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from gemmpipe.core.errors import printable
from gemmpipe.core.events import counted, verb
from gemmpipe.core.text_table import Column, aligned, escape_markdown, markdown
from gemmpipe.core.units import speedup_text, time_text
from gemmpipe.report.choices import SHIPPED, Choice, ChoiceTable
from gemmpipe.report.diff import FASTER, SLOWER, UNSURE, VERDICTS, Difference, Pair, on_shared_device
from gemmpipe.report.last_run import names_last
from gemmpipe.report.lines import KNOB_LETTERS, marked_knobs, wrapped
from gemmpipe.report.results import spread

_SIZE_COLUMNS = ("M", "N", "K", "token", "B", "model_dim", "inter_dim", "expert", "topk")
"""Key columns that a table of products shows always; others only where they differ between its rows."""
_SHOWN_REASONS = 3
_LARGE_CHANGE = 10
_UNDER_A_SIDE = " " * len("A (before)  ")


def text_lines(found: Difference, width: int, most: int) -> list[str]:
    """The comparison in lines of at most `width` characters, with at most `most` changed products."""
    lines = [
        *wrapped(f"A (before)  {side_text(found.before)}", width, _UNDER_A_SIDE),
        *wrapped(f"B (after)   {side_text(found.after)}", width, _UNDER_A_SIDE),
        "",
        *wrapped(summary_line(found), width, "  "),
    ]
    lines += [part for text in note_lines(found) for part in wrapped(text, width, "  ")]
    if found.pairs:
        lines += ["", *aligned(regime_columns(found), width)]
    changed = changed_pairs(found)
    if changed:
        lines += ["", *aligned(pair_columns(changed[:most]), width)]
        if len(changed) > most:
            lines.append(f"{len(changed) - most:,} more that are not the same; n=0 lists all")
    return lines


def markdown_lines(found: Difference, most: int) -> list[str]:
    """The comparison in Markdown; names from files are escaped."""
    lines = [
        f"**gemmpipe diff**: {summary_line(found)}",
        "",
        f"- A (before): {escape_markdown(side_text(found.before))}",
        f"- B (after): {escape_markdown(side_text(found.after))}",
        *(f"- {escape_markdown(text)}" for text in note_lines(found)),
    ]
    if found.pairs:
        lines += ["", *markdown(regime_columns(found))]
    changed = changed_pairs(found)
    if changed:
        lines += ["", *markdown(pair_columns(changed[:most]))]
        if len(changed) > most:
            lines += ["", f"{len(changed) - most:,} more that are not the same"]
    return lines


def summary_line(found: Difference) -> str:
    """The counts in one line."""
    verdicts = ", ".join(f"{found.counts[verdict]:,} {verdict}" for verdict in VERDICTS)
    rest = f"{len(found.new):,} new, {len(found.lost):,} lost, {found.changed_winners:,} with another winner"
    if found.of_other_devices:
        there = verb(found.of_other_devices, "is", "are")
        rest += f" ({found.of_other_devices:,} new or lost {there} of a device that the other side does not have)"
    return f"{counted(len(found.pairs), 'product')} compared: {verdicts}; {rest}"


def note_lines(found: Difference) -> list[str]:
    """Notes on the reliability of a comparison: rows kept apart, rows compared all the same, default noise."""
    notes = []
    apart = Counter(_difference_of(a, b) for a, b in found.not_compared)
    for reason, count in apart.most_common(_SHOWN_REASONS):
        notes.append(f"not compared: {counted(count, 'product')}, {reason}; across=true compares them")
    across = Counter(reason for pair in found.pairs if (reason := _difference_of(pair.before, pair.after)))
    for reason, count in across.most_common(_SHOWN_REASONS):
        notes.append(f"warning: {counted(count, 'product')} compared across {reason}")
    if not found.pairs and not found.not_compared and (found.new or found.lost):
        devices = [", ".join(side.devices) for side in (found.before, found.after)]
        of = f" ({devices[0]}; {devices[1]})" if devices[0] != devices[1] else ""
        notes.append(f"the sides have no product in common{of}")
    unchanged = spread(1 / pair.ratio for pair in found.pairs if not pair.changed_winner)
    if unchanged is not None and found.changed_winners:
        text = f"{counted(unchanged.count, 'product')} with the same winner: geomean {unchanged.mean:.3f}x"
        notes.append(f"{text}, by the machine or the software alone")
    unsure = [pair for pair in found.pairs if pair.verdict == UNSURE]
    if shared := sum(on_shared_device(pair.before, pair.after) for pair in unsure):
        was = "was" if shared == 1 else "were"
        notes.append(f"{counted(shared, 'product')} {was} timed while other processes used the device: unsure")
    if found.without_interval:
        sides = [choice for pair in found.pairs for choice in (pair.before, pair.after) if choice.noise_pct is None]
        assumed = ", ".join(f"{percent:g} %" for percent in sorted({found.rules.noise_pct(choice) for choice in sides}))
        noise = f"{assumed} noise assumed (default_noise)"
        notes.append(f"{counted(found.without_interval, 'row')} without an interval: {noise}")
    return notes


def _difference_of(a: Choice, b: Choice) -> str:
    """Why two rows of one product are not of one kind; empty if they are."""
    devices = [choice.device or f"{choice.gfx}:{choice.cu_num}" for choice in (a, b)]
    if (a.gfx, a.cu_num) != (b.gfx, b.cu_num) or (a.device and b.device and a.device != b.device):
        return f"devices {devices[0]} and {devices[1]}"
    if a.policy != b.policy:
        return f"timing methods '{a.policy or 'unknown'}' and '{b.policy or 'unknown'}'"
    return ""


def side_text(side: ChoiceTable) -> str:
    """A side in one line: name, path, products, devices."""
    devices = ", ".join(side.devices)
    kernel = f"{side.kernel}, " if side.kernel else ""
    name = f"{side.name} = " if names_last(side.name) or side.name == SHIPPED else ""
    return printable(f"{name}{side.path}: {kernel}{counted(len(side.choices), 'product')}, {devices}")


def changed_pairs(found: Difference) -> list[Pair]:
    """The pairs that are not the same, the surest losses first, then gains, then those that are unsure."""
    order = {SLOWER: 0, FASTER: 1, UNSURE: 2}
    changed = [pair for pair in found.pairs if pair.verdict in order]
    return sorted(changed, key=lambda p: (order[p.verdict], p.ratio if p.verdict == FASTER else -p.ratio))


def regime_columns(found: Difference) -> list[Column]:
    """The columns of the table of regimes."""
    regimes = found.regimes
    return [
        Column(title="rows", cells=tuple(each.label for each in regimes), is_text=True),
        Column(title="products", cells=tuple(f"{each.speedup.count:,}" for each in regimes)),
        Column(title="speed-up, geomean", cells=tuple(_change_text(each.speedup.mean) for each in regimes)),
        Column(title="least", cells=tuple(_change_text(each.speedup.least) for each in regimes)),
        Column(title="most", cells=tuple(_change_text(each.speedup.most) for each in regimes)),
    ]


def _change_text(speedup: float) -> str:
    """`1.034x`: three decimals, since changes between runs are of percents; of large ones three digits."""
    return f"{speedup:.3f}x" if speedup < _LARGE_CHANGE else speedup_text(speedup)


def pair_columns(pairs: Sequence[Pair]) -> list[Column]:
    """The columns of a table of pairs."""
    cells = [dict(pair.key) for pair in pairs]
    names = list(dict.fromkeys(name for cell in cells for name in cell))
    varied = [name for name in names if len({cell.get(name) for cell in cells}) > 1]
    sizes = [name for name in _SIZE_COLUMNS if name in names]
    others = [name for name in varied if name not in sizes]
    return [
        *(Column(title=name, cells=tuple(cell.get(name, "") for cell in cells)) for name in sizes),
        *(Column(title=n, cells=tuple(c.get(n, "") for c in cells), is_text=True, importance=1) for n in others),
        Column(title="A", cells=tuple(time_text(pair.before.time_us) for pair in pairs)),
        Column(title="B", cells=tuple(time_text(pair.after.time_us) for pair in pairs)),
        Column(title="change", cells=tuple(_percent_text(pair.ratio) for pair in pairs)),
        Column(title="interval", cells=tuple(_interval_text(pair) for pair in pairs), is_text=True, importance=2),
        Column(title="verdict", cells=tuple(pair.verdict for pair in pairs), is_text=True),
        Column(title="winner", cells=tuple(_winner_text(pair) for pair in pairs), is_text=True, importance=3),
    ]


def _percent_text(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _interval_text(pair: Pair) -> str:
    return f"{100 * (pair.low - 1):+.1f} to {100 * (pair.high - 1):+.1f} %"


def _winner_text(pair: Pair) -> str:
    """The winner; of another one what changed: the backend, or the knobs that differ."""
    before, after = pair.before, pair.after
    if not pair.changed_winner:
        return f"{after.backend} {knobs_text(after.config)}".strip()
    if before.backend != after.backend:
        return f"{before.backend} -> {after.backend} {knobs_text(after.config)}".strip()
    old, new = _knobs(before.config), _knobs(after.config)
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    changes = (f"{name} {old.get(name, '-')} -> {new.get(name, '-')}" for name in names)
    return printable(f"{after.backend}: {', '.join(changes)}") if names else f"{after.backend}: {after.kernel_name}"


def _knobs(config: str) -> dict[str, object]:
    """The knobs of a cell; none for a cell that is no JSON object."""
    try:
        knobs = json.loads(config) if config else {}
    except (ValueError, RecursionError):
        return {}
    return knobs if isinstance(knobs, dict) else {}


def knobs_text(config: str) -> str:
    """Knobs abbreviated: `64x128x128 g1 k/4 w4 s3`; a library's knobs in full."""
    return printable(marked_knobs(_knobs(config), KNOB_LETTERS))


def knobs_legend(configs: Iterable[str]) -> str:
    """The meaning of the marks of abbreviated knobs: `BLOCK_SIZE_M x N x K, g GROUP_SIZE_M, ...`; empty without any."""
    used = {name for config in configs for name in _knobs(config)}
    marks = [f"{mark.strip()} {name}" for name, mark in KNOB_LETTERS.items() if name in used and mark.strip(" x")]
    return ", ".join(["BLOCK_SIZE_M x N x K", *marks]) if marks else ""


def as_json(found: Difference, fail_above_pct: float | None = None) -> str:
    """Everything as a JSON object; with a gate its limit and the products that fail it."""
    content: dict[str, object] = {
        "before": _side_object(found.before),
        "after": _side_object(found.after),
        "counts": dict(found.counts),
        "new": [dict(choice.key) for choice in found.new],
        "lost": [dict(choice.key) for choice in found.lost],
        "changed_winners": found.changed_winners,
        "notes": note_lines(found),
        "not_compared": [{"key": dict(b.key), "reason": _difference_of(a, b)} for a, b in found.not_compared],
        "regimes": [
            {
                "rows": each.label,
                "products": each.speedup.count,
                "speedup": round(each.speedup.mean, 4),
                "least": round(each.speedup.least, 4),
                "most": round(each.speedup.most, 4),
            }
            for each in found.regimes
        ],
        "products": [pair.as_row() for pair in found.pairs],
    }
    if fail_above_pct is not None:
        failed = [dict(pair.key) for pair in found.slower_by(fail_above_pct)]
        content["gate"] = {"fail_above_pct": fail_above_pct, "failed": failed}
    return json.dumps(content, indent=2)


def _side_object(side: ChoiceTable) -> dict[str, object]:
    return {
        "name": side.name,
        "path": str(side.path),
        "kernel": side.kernel,
        "products": len(side.choices),
        "devices": list(side.devices),
    }
