"""The summary of a comparison: by regime of M, each entry's ratio to the tuned choice, own kernels and the floor."""

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gemmpipe.backends import NOT_THIS_PRODUCT
from gemmpipe.core.data import Status, median
from gemmpipe.core.events import counted, verb
from gemmpipe.core.text_table import Column, aligned, beside
from gemmpipe.core.units import MISSING, time_text
from gemmpipe.stages.compare.absent import NO_GPU
from gemmpipe.stages.compare.baseline import LIBRARY, PEER, full_name, grouped_name, unknown_line
from gemmpipe.stages.compare.choices import choice_lines, fastest, fastest_of, slower_problems
from gemmpipe.stages.compare.entries import AUTOTUNE, OWN, TUNED
from gemmpipe.tables.merge import SHARED_CPU, SHARED_GPU

if TYPE_CHECKING:
    import pandas as pd

_MEANS = ("over_tuned", "over_own", "over_floor", "us")
REGIMES = (
    "regime",
    "name",
    *(f"{r}{of}" for r in _MEANS for of in ("", "_least", "_most", "_of")),
    "own_behind",
    "shared",
)
"""The columns of `regimes`: geometric means of columns of `compared`, with least, most and count; `shared` counts the
problems that were timed while other processes used the device."""
UNLIKE, COPIED, ABOUT = "*", "+", "~"
_AND_PEER = f" and '{PEER}'"
NOTES = {
    UNLIKE: "* computes another product of this size, or nothing",
    COPIED: f"+ keeps a copy of the weight, which takes more memory: does not count for '{LIBRARY}'{_AND_PEER}",
}
_BASELINE_TITLES = ("own kernels", "own behind", "tuned", "over floor (most)")
_ROOM_FOR_RANGES = 60
_JOINED = {
    "not timed without a GPU": NO_GPU,
    "not timed, as not for these products on any device": (NOT_THIS_PRODUCT,),
}
"""What is said of all entries together with reasons that begin so."""
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
        yield grouped_name(str(label)), fastest(part)
    yield LIBRARY, fastest_of(within, LIBRARY)
    yield PEER, fastest_of(within, PEER)


def _means(part: "pd.DataFrame") -> dict[str, float]:
    found: dict[str, float] = {}
    for column in _MEANS:
        values = [float(v) for v in part[column].dropna()]
        found[f"{column}_of"] = len(values)
        if values:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            found |= {column: mean, f"{column}_least": min(values), f"{column}_most": max(values)}
    return found | {"own_behind": int((part["over_own"] < 1).sum()), "shared": len(_shared(part))}


def _shared(rows: "pd.DataFrame") -> set[str]:
    """The problems with times that were taken while other processes used the device."""
    words = frozenset((SHARED_CPU, SHARED_GPU))
    policies = zip(rows["problem"], rows["policy"], strict=True)
    return {str(problem) for problem, policy in policies if not words.isdisjoint(str(policy).split())}


def shared_line(compared: "pd.DataFrame") -> str:
    """`2 of 3 problems were timed while other processes used the CPU (shared_cpu)`; empty if none was."""
    timed = compared[compared["us"].notna()]
    shared = _shared(timed)
    if not shared:
        return ""
    on_cpu = any(SHARED_CPU in str(policy).split() for policy in timed["policy"])
    of_all = f"{len(shared):,} of {counted(timed['problem'].nunique(), 'problem')} {verb(len(shared), 'was', 'were')}"
    user = f"other processes used the CPU ({SHARED_CPU})" if on_cpu else f"other work used the GPU ({SHARED_GPU})"
    return f"{of_all} timed while {user}"


def lines(compared: "pd.DataFrame", regimes: "pd.DataFrame", baseline: str | None, width: int) -> list[str]:
    """The printed summary: entries over the tuned choice, own kernels against one entry, and untimed entries.

    Its tables have at most `width` columns.
    """
    if not compared["us"].notna().any():
        number = counted(compared["problem"].nunique(), "problem")
        return [f"nothing was timed: no entry of {number} can run here, for these reasons:", *_untimed_lines(compared)]
    name = full_name(baseline or LIBRARY, set(regimes["name"]))
    shown = regimes if name == PEER else without_equal_peer(regimes)
    return [
        *_ratio_table(shown, marks_of(compared), width),
        *([f"  {ABOUT} approximate: {shared}"] if (shared := shared_line(compared)) else []),
        *choice_lines(compared),
        *_baseline_lines(compared, regimes, name, width),
        *slower_problems(compared, name),
        *_tuning_lines(compared),
        *_untimed_lines(compared),
    ]


def without_equal_peer(regimes: "pd.DataFrame") -> "pd.DataFrame":
    """Without the fastest peer where it is the fastest library: no peer has run, or none is faster."""
    columns = ["regime", *(f"{ratio}{of}" for ratio in _MEANS for of in ("", "_of"))]
    library, peer = (regimes[regimes["name"] == name][columns].reset_index(drop=True) for name in (LIBRARY, PEER))
    return regimes[regimes["name"] != PEER] if library.equals(peer) else regimes


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
    notes = [note if PEER in by_name else note.replace(_AND_PEER, "") for mark, note in NOTES.items() if mark in used]
    ranges = " (least to most)" if width >= _ROOM_FOR_RANGES else ""
    title = f"{what}: geomean{ranges}"  # on a line of its own: the first column is that of the names
    table = [line for part in beside(columns, width, names) for line in aligned([names, *part], width)]
    return [title, *table, *(f"  {note}" for note in notes)]


def _span(row: "Mapping[Hashable, Any]", ratio: str, width: int) -> str:
    """The mean with its range; the mean alone where a table of `width` columns has no room (regimes.csv has both)."""
    values = [row[f"{ratio}{of}"] for of in ("", "_least", "_most")]
    mean, least, most = (time_text(value) if ratio == "us" else f"{value:.2f}" for value in values)
    text = mean if least == most or width < _ROOM_FOR_RANGES else f"{mean} ({least} to {most})"
    return f"{_about(row)}{text}"


def _about(row: "Mapping[Hashable, Any]") -> str:
    return ABOUT if row.get("shared", 0) else ""


def _baseline_lines(compared: "pd.DataFrame", regimes: "pd.DataFrame", name: str, width: int) -> list[str]:
    """The table of own kernels and the choice against one entry, or why there is none."""
    if name in set(regimes["name"]):
        return _baseline_table(regimes, name, width)
    ours = compared[compared["name"].isin((TUNED, OWN)) & compared["us"].notna()]
    if name == LIBRARY and not len(ours):
        return []  # there is nothing to compare with one
    return [unknown_line(name, regimes["name"], set(compared["name"]))]


def _baseline_table(regimes: "pd.DataFrame", name: str, width: int) -> list[str]:
    """Own kernels and the choice against one entry, a row per regime; columns without a value are left out."""
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
    return f"{_about(row)}{row[ratio]:.2f} ({row[f'{ratio}_{which}']:.2f}) of {row[f'{ratio}_of']:.0f}"


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
    joined: dict[
        str, list[str]
    ] = {}  # on a CPU most entries: a line for those without a GPU, and for those without use
    for (name, _), reasons in kinds.items():
        if title := _joined_title(reasons[0]):
            joined.setdefault(title, []).append(name)
    shown: dict[str, list[str]] = {}
    for (name, _), reasons in kinds.items():
        if len(joined.get(_joined_title(reasons[0]), ())) < 2:
            alike = "" if len(set(reasons)) == 1 else ", or similar"
            shown.setdefault(f"{reasons[0]}{alike} ({counted(len(reasons), 'problem')})", []).append(name)
    lines = [f"not timed: {', '.join(names)}: {reason}" for reason, names in shown.items()]
    joined = {title: list(dict.fromkeys(names)) for title, names in joined.items() if len(names) > 1}
    return lines + [f"{title}: {', '.join(names)} (compared.csv has why)" for title, names in joined.items()]


def _joined_title(reason: str) -> str:
    """What is said once of all entries with such a reason; empty for reasons with a line of their own."""
    return next((title for title, beginnings in _JOINED.items() if reason.startswith(beginnings)), "")
