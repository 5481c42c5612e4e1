"""The summary of a comparison: by regime of M, each entry's ratio to the tuned choice, own kernels and the floor."""

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gemmpipe.core.data import Status, median
from gemmpipe.core.errors import suggest_or_list
from gemmpipe.core.events import counted
from gemmpipe.core.text_table import Column, aligned, beside
from gemmpipe.core.units import MISSING, time_text
from gemmpipe.stages.compare.entries import AUTOTUNE, TUNED

if TYPE_CHECKING:
    import pandas as pd

LIBRARY, PEER = "fastest library", "fastest peer"
"""The fastest of a library's paths, and of everything by others; neither needs more weight memory."""
_MEANS = ("over_tuned", "over_own", "over_floor", "us")
REGIMES = (
    "regime",
    "name",
    *(f"{r}{of}" for r in _MEANS for of in ("", "_least", "_most", "_of")),
    "own_behind",
)
"""The columns of `regimes`: geometric means of columns of `compared`, with least, most and count."""
UNLIKE, COPIED = "*", "+"
NOTES = {
    UNLIKE: "* computes another product of this size, or nothing",
    COPIED: f"+ keeps a copy of the weight, which takes more memory: does not count for '{LIBRARY}' and '{PEER}'",
}
_BASELINE_TITLES = ("own kernels", "own behind", "tuned", "over floor (most)")
_ROOM_FOR_RANGES = 60
_MOST_LINES = 20
_NO_GPU = ("no GPU", "no NVIDIA GPU")
_MOST_NAMES = 6
"""A backend with more names is one entry of the summary, its fastest candidate on each problem."""


def summarize(compared: "pd.DataFrame", bounds: Sequence[int]) -> "pd.DataFrame":
    """A row per regime and name; `bounds`: the largest M of each regime but the last."""
    import pandas as pd

    names = compared[compared["us"].notna()].drop_duplicates("name").groupby("libtype")["name"].count()
    many = [str(label) for label, count in names.items() if count > _MOST_NAMES]
    rows = [
        {"regime": label, "name": name, **_means(part)}
        for label, within in _by_regime(compared, bounds)
        for name, part in _by_name(within, many)
        if part["us"].notna().any()
    ]
    return pd.DataFrame(rows, columns=list(REGIMES))


def _by_regime(compared: "pd.DataFrame", bounds: Sequence[int]) -> "Iterator[tuple[str, pd.DataFrame]]":
    """Yields the rows of each regime, labelled by the Ms that occur: `M 1 to 64`."""
    low = 0.0
    for high in (*bounds, math.inf):
        part = compared[(compared["M"] > low) & (compared["M"] <= high)]
        low = high
        if len(part):
            first, last = part["M"].min(), part["M"].max()
            yield f"M {first} to {last}" if first != last else f"M {first}", part


def _by_name(within: "pd.DataFrame", many: Collection[str]) -> "Iterator[tuple[str, pd.DataFrame]]":
    """Yields the rows of each name, then those of the fastest library and of the fastest peer on each problem.

    Names of backends in `many` are one: that of the backend with its fastest candidate on each problem.
    """
    grouped = within["libtype"].isin(many) & within["peer"]
    for name, part in within[~grouped].groupby("name", sort=False):
        yield str(name), part
    for label, part in within[grouped].groupby("libtype", sort=False):
        yield f"{label}, its fastest", _fastest(part)
    yield LIBRARY, fastest_of(within, LIBRARY)
    yield PEER, fastest_of(within, PEER)


def fastest_of(compared: "pd.DataFrame", kind: str) -> "pd.DataFrame":
    """The row of the fastest path of each problem, among libraries (LIBRARY) or peers (PEER)."""
    chosen = compared["library"] & (compared["name"] != TUNED) if kind == LIBRARY else compared["peer"]
    return _fastest(compared[chosen])


def _fastest(rows: "pd.DataFrame") -> "pd.DataFrame":
    """The fastest row of each problem, by its paired ratio where there is one."""
    return rows[rows["us"].notna()].sort_values(["over_tuned", "us"]).drop_duplicates("problem")


def _means(part: "pd.DataFrame") -> dict[str, float]:
    found: dict[str, float] = {}
    for column in _MEANS:
        values = [float(v) for v in part[column].dropna()]
        found[f"{column}_of"] = len(values)
        if values:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            found |= {column: mean, f"{column}_least": min(values), f"{column}_most": max(values)}
    return found | {"own_behind": int((part["over_own"] < 1).sum())}


def lines(compared: "pd.DataFrame", regimes: "pd.DataFrame", baseline: str | None, width: int) -> list[str]:
    """The printed summary: entries over the tuned choice, own kernels against one entry, and untimed entries.

    Its tables have at most `width` columns.
    """
    name = _full_name(baseline or LIBRARY, regimes["name"])
    return [
        *_ratio_table(regimes, marks_of(compared), width),
        *_baseline_table(regimes, name, width),
        *_slower_problems(compared, name),
        *_tuning_lines(compared),
        *_untimed_lines(compared),
    ]


def _full_name(baseline: str, timed: "pd.Series[str]") -> str:
    """The name of a backend's only timed path, if `baseline` is a backend's label; else `baseline`."""
    own = {name for name in timed if name.startswith(f"{baseline} ")}
    return own.pop() if len(own) == 1 and baseline not in set(timed) else baseline


def marks_of(compared: "pd.DataFrame") -> dict[str, str]:
    """By name: the marks of timed entries that are not among the fastest ones, however fast they are."""
    found: dict[str, str] = {}
    for row in compared[compared["us"].notna()].to_dict("records"):
        mark = UNLIKE if row.get("unlike") is True else COPIED if (row.get("extra_weight_bytes") or 0) > 0 else ""
        if mark:
            found[str(row["name"])] = mark
    return found


def _ratio_table(regimes: "pd.DataFrame", marked: Mapping[str, str], width: int) -> list[str]:
    """A row per name, a column per regime; times instead of ratios where nothing is tuned.

    Regimes that do not fit beside the others in `width` columns stand below them, each part with the names.
    """
    ratio = "over_tuned" if regimes["over_tuned"].notna().any() else "us"
    shown = regimes.dropna(subset=[ratio])
    what = "time over the tuned choice's" if ratio == "over_tuned" else "time of a call, as nothing is tuned here"
    by_name = {
        str(name): {str(r["regime"]): r for r in part.to_dict("records")}
        for name, part in shown.groupby("name", sort=False)
    }
    names = Column(title="", cells=tuple(f"  {n} {marked.get(n, '')}".rstrip() for n in by_name), is_text=True)
    columns = [
        Column(
            title=label,
            cells=tuple(_span(rows[label], ratio, width) if label in rows else MISSING for rows in by_name.values()),
            is_text=True,
        )
        for label in dict.fromkeys(map(str, shown["regime"]))
    ]
    used = "".join(marked.get(name, "") for name in by_name)
    ranges = " (least to most)" if width >= _ROOM_FOR_RANGES else ""
    title = f"{what}: geomean{ranges}"  # on a line of its own: the first column is that of the names
    table = [line for part in beside(columns, width, names) for line in aligned([names, *part], width)]
    return [title, *table, *(f"  {note}" for mark, note in NOTES.items() if mark in used)]


def _span(row: "Mapping[Hashable, Any]", ratio: str, width: int) -> str:
    """The mean with its range; the mean alone where a table of `width` columns has no room (regimes.csv has both)."""
    values = [row[f"{ratio}{of}"] for of in ("", "_least", "_most")]
    mean, least, most = (time_text(value) if ratio == "us" else f"{value:.2f}" for value in values)
    return mean if least == most or width < _ROOM_FOR_RANGES else f"{mean} ({least} to {most})"


def _baseline_table(regimes: "pd.DataFrame", name: str, width: int) -> list[str]:
    """Own kernels and the choice against one entry, a row per regime; columns without a value are left out."""
    if name not in set(regimes["name"]):
        several = [str(n) for n in dict.fromkeys(regimes["name"]) if n.startswith(f"{name} ")]
        if several:
            return [f"stages.compare.baseline: '{name}' has several paths; expected one of {', '.join(several)}"]
        return [f"stages.compare.baseline: no timed entry named '{name}'{suggest_or_list(name, regimes['name'])}"]
    if not regimes[["over_own_of", "over_tuned_of"]].to_numpy().any():
        return []  # without an own kernel and a choice it is compared with nothing
    labels, rows = [], []
    for label, part in regimes.groupby("regime", sort=False):
        by_name = {str(r["name"]): r for r in part.to_dict("records")}
        other, tuned = by_name.get(name, {}), by_name.get(TUNED, {})
        behind = f"{other['own_behind']:.0f}" if other.get("over_own_of", 0) else MISSING
        own, choice = _pair(other, "over_own", "least"), _pair(other, "over_tuned", "least")
        labels.append(f"  {label}")
        rows.append((own, behind, choice, _pair(tuned, "over_floor", "most")))
    first = Column(title="", cells=tuple(labels), is_text=True)
    columns = [
        Column(title=title, cells=tuple(cells), is_text=True)
        for title, cells in zip(_BASELINE_TITLES, zip(*rows, strict=True), strict=True)
        if set(cells) != {MISSING}
    ]
    title = f"speed-up over {name}: geomean (least) of problems"
    table = [line for part in beside(columns, width, first) for line in aligned([first, *part], width)]
    return [title, *table]


def _pair(row: "Mapping[Hashable, Any]", ratio: str, which: str) -> str:
    if not row.get(f"{ratio}_of", 0):
        return MISSING
    return f"{row[ratio]:.2f} ({row[f'{ratio}_{which}']:.2f}) of {row[f'{ratio}_of']:.0f}"


def _slower_problems(compared: "pd.DataFrame", baseline: str) -> list[str]:
    """The problems with own kernels slower than the baseline, the worst first."""
    rows = fastest_of(compared, baseline) if baseline in (LIBRARY, PEER) else compared[compared["name"] == baseline]
    timed = rows.dropna(subset=["over_own"])
    if not len(timed):
        return []
    lost = timed[timed["over_own"] < 1].sort_values("over_own")
    text = [f"own kernels behind {baseline} on {len(lost)} of {counted(len(timed), 'problem')}"]
    for row in lost.head(_MOST_LINES).to_dict("records"):
        text.append(
            f"  M={row['M']} N={row['N']} K={row['K']}: {row['over_own']:.3f} ({row['name']} {time_text(row['us'])})"
        )
    return text + ([f"  and {len(lost) - _MOST_LINES} more in compared.csv"] if len(lost) > _MOST_LINES else [])


def _tuning_lines(compared: "pd.DataFrame") -> list[str]:
    """The cost of the choices of Triton's own tuner."""
    shown = compared[compared["name"].eq(AUTOTUNE) & compared["tuning_s"].notna()]
    if not len(shown):
        return []
    seconds, cut = list(shown["tuning_s"]), int((shown["tried"] < shown["of"]).sum())
    tried = f"{median(shown['tried']):,.0f} of {median(shown['of']):,.0f} configurations per problem (median)"
    ended = f"; cut short by backend.autotune.limit_s on {cut} of {len(shown)}" if cut else ""
    compiled = f"{int(shown['compiled'].sum()):,} compiled"
    return [f"{AUTOTUNE}: chose in {sum(seconds):.0f} s, {median(seconds):.1f} s and {tried}, {compiled}{ended}"]


def _untimed_lines(compared: "pd.DataFrame") -> list[str]:
    """The entries without a time, by kind of reason, with the first reason of each kind."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for row in compared[compared["us"].isna()].to_dict("records"):
        excluded = row["status"] == Status.UNSUPPORTED  # by a rule, or as there is no row: that is the reason alone
        reason = str(row["error"]) if excluded else f"{row['status']}: {row['error']}"
        kinds.setdefault((str(row["name"]), ":".join(reason.split(":")[: 1 if excluded else 2])), []).append(reason)
    no_gpu = [name for (name, _), reasons in kinds.items() if reasons[0].startswith(_NO_GPU)]
    joined = no_gpu if len(no_gpu) > 1 else []  # on a CPU most entries: one line for all
    shown: dict[str, list[str]] = {}
    for (name, _), reasons in kinds.items():
        if name in joined and reasons[0].startswith(_NO_GPU):
            continue
        alike = "" if len(set(reasons)) == 1 else ", or similar"
        shown.setdefault(f"{reasons[0]}{alike} ({counted(len(reasons), 'problem')})", []).append(name)
    without = [f"not timed without a GPU: {', '.join(joined)} (compared.csv has why)"] if joined else []
    return [*(f"not timed: {', '.join(names)}: {reason}" for reason, names in shown.items()), *without]
