"""The fastest entries of a comparison, what its tuned entries are, and the problems with slower own kernels."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gemmpipe.core.events import counted
from gemmpipe.core.units import time_text
from gemmpipe.stages.compare.baseline import LIBRARY, PEER
from gemmpipe.stages.compare.entries import NAMES, TUNED

if TYPE_CHECKING:
    import pandas as pd

_MOST_LINES = 20
_MOST = 6
"""Names in a line; compared.csv has all."""


def fastest_of(compared: "pd.DataFrame", kind: str) -> "pd.DataFrame":
    """The row of the fastest path of each problem, among libraries (LIBRARY) or peers (PEER)."""
    chosen = compared["library"] & (compared["name"] != TUNED) if kind == LIBRARY else compared["peer"]
    return fastest(compared[chosen])


def fastest(rows: "pd.DataFrame") -> "pd.DataFrame":
    """The fastest row of each problem, by its paired ratio where there is one; the first of several equal ones."""
    timed = rows[rows["us"].notna()]
    return timed.sort_values(["over_tuned", "us"], kind="stable").drop_duplicates("problem")


def with_fastest(compared: "pd.DataFrame") -> "pd.DataFrame":
    """The rows with the column `fastest`: True for the fastest entry of a problem.

    It computes this product, without more memory for the weight: a choice of the tables counts with such memory too.
    """
    alike = compared["unlike"].eq(False) & ~compared["extra_weight_bytes"].gt(0)
    first = fastest(compared[alike | compared["name"].eq(TUNED)])
    return compared.assign(fastest=compared.index.isin(first.index))


def choice_lines(compared: "pd.DataFrame") -> Iterator[str]:
    """What the tuned entries are, and the names of the fastest ones."""
    tuned = compared[compared["name"].eq(TUNED) & compared["us"].notna()]
    if len(tuned):
        yield f"tuned is the choice of the tables: {_counts(_other_names(tuned, compared))}"
    conditions = [str(text) for text in tuned["condition"] if isinstance(text, str) and text]
    if conditions:
        yield f"tuned has no row of the problem's own condition, and takes that of calls: {_counts(conditions)}"
    names = [str(name) for name in compared[compared["fastest"].eq(True)]["name"]]
    if names:
        where = "" if len(names) == 1 else " (each: compared.csv, fastest)"
        yield f"fastest without more weight memory: {_counts(names)}{where}"


def slower_problems(compared: "pd.DataFrame", baseline: str) -> list[str]:
    """The problems with own kernels slower than the baseline, the worst first."""
    timed = _baseline_rows(compared, baseline).dropna(subset=["over_own"])
    if not len(timed):
        return []
    lost = timed[timed["over_own"] < 1].sort_values("over_own")
    text = [f"own kernels behind {baseline} on {len(lost)} of {counted(len(timed), 'problem')}"]
    for row in lost.head(_MOST_LINES).to_dict("records"):
        text.append(
            f"  M={row['M']} N={row['N']} K={row['K']}: {row['over_own']:.3f} ({row['name']} {time_text(row['us'])})"
        )
    return text + ([f"  and {len(lost) - _MOST_LINES} more in compared.csv"] if len(lost) > _MOST_LINES else [])


def _baseline_rows(compared: "pd.DataFrame", baseline: str) -> "pd.DataFrame":
    """The rows of the entry of each problem that own kernels are compared with."""
    if baseline in (LIBRARY, PEER):
        return fastest_of(compared, baseline)
    rows = compared[compared["name"] == baseline]
    label = baseline.partition(",")[0]
    return rows if len(rows) else fastest(compared[compared["libtype"].eq(label) & compared["peer"]])


def _other_names(tuned: "pd.DataFrame", compared: "pd.DataFrame") -> Iterator[str]:
    """The names of the same candidates as entries of libraries; the backend's label for own kernels."""
    keys = ["problem", "libtype", "config"]
    others = compared[compared["us"].notna() & ~compared["name"].isin(NAMES)]
    names = {tuple(key): str(name) for *key, name in others[[*keys, "name"]].itertuples(index=False)}
    for problem, libtype, config in tuned[keys].itertuples(index=False):
        yield names.get((problem, libtype, config), str(libtype))


def _counts(names: Iterable[str]) -> str:
    """`torch mm on 2 problems, triton on 1`, the most frequent name first."""
    most = Counter(names).most_common()
    parts = [f"{name} on {counted(n, 'problem') if place == 0 else n}" for place, (name, n) in enumerate(most[:_MOST])]
    return ", ".join(parts) + (f" and {counted(len(most) - _MOST, 'other name')}" if len(most) > _MOST else "")
