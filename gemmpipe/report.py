"""What the user reads at the end of a run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gemmpipe.executors import Pool, Usage
from gemmpipe.interrupt import Interrupted
from gemmpipe.stages.incumbents import native_table

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.runner import Plan
    from gemmpipe.stages import Context

_MOST_ROWS = 200


def tell(
    plan: "Plan", tables: "Mapping[str, pd.DataFrame]", context: "Context", pool: Pool | None, wall_s: float, code: int
) -> None:
    """The choices, the time and where it went, the files, and what to type next."""
    say = lambda text: context.events.emit("line", text)  # noqa: E731
    if "selections" in tables:
        for line in selection_lines(tables["selections"], plan.family.key_columns):
            say(line)
    for line in context.gated[:5]:
        context.events.emit("line", f"  gated: {line}; stages.select.max_extra_weight_pct= allows it")
    if len(context.gated) > 5:
        say(f"  gated: and {len(context.gated) - 5} more like these")
    say(f"total {wall_s:.1f} s" + "".join(f", {k[:-2]} {v:.1f}" for k, v in context.account.items() if "idle" not in k))
    for usage in pool.usage() if pool is not None else []:
        say(f"  {usage_line(usage)}")
    for path in context.files:
        say(f"wrote {path}")
    say(f"run   {plan.run_dir}")
    if code == Interrupted.exit_code:
        say(f"to go on: gemmpipe resume={plan.run_dir}")
    elif "merge" in plan.chain and context.files:
        table = native_table(plan.family, context.output, plan.formats).resolve()
        say(f"export GEMMPIPE_CONFIG_{plan.family.name.upper()}={table}")


def usage_line(usage: Usage) -> str:
    """Where one resource's time went."""
    spent = ", ".join(f"{k} {v:.1f}" for k, v in sorted(usage.busy_s.items(), key=lambda kv: -kv[1]))
    return f"{usage.name}: {spent or 'nothing to do'}; idle {usage.idle_s:.1f} of {usage.wall_s:.1f} s"


def selection_lines(selections: "pd.DataFrame", key_columns: "Sequence[object]") -> list[str]:
    """An aligned table: problem, chosen candidate, time, TFLOP/s, GB/s, ratio to the baseline."""
    own = selections[selections["format"] == ""]
    rows = [("M", "N", "K", "chosen", "us", "TFLOP/s", "GB/s", "baseline", "ratio")]
    for row in own.head(_MOST_ROWS).to_dict("records"):
        ratio = row["ratio"]
        rows.append(
            (
                str(row["M"]),
                str(row["N"]),
                str(row["K"]),
                f"{row['libtype']} {_short(str(row['config']))}",
                f"{row['us']:.2f}",
                f"{row['tflops']:.1f}",
                f"{row['bw']:.0f}",
                str(row["baseline"] or "-"),
                f"{ratio:.3f}" if ratio == ratio and ratio is not None else "-",
            )
        )
    if len(rows) == 1:
        return []
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i in (3, 7) else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
    if len(own) > _MOST_ROWS:
        lines.append(f"... and {len(own) - _MOST_ROWS} more in selections.csv")
    return lines


_BRIEF = {
    "BLOCK_SIZE_M": "",
    "BLOCK_SIZE_N": "x",
    "BLOCK_SIZE_K": "x",
    "GROUP_SIZE_M": " g",
    "NUM_KSPLIT": " k/",
    "num_warps": " w",
    "num_stages": " s",
}


def _short(config: str) -> str:
    """Knobs in a few letters: `64x128x128 g1 k/4 w4 s3`; a library's knobs as they are."""
    import json

    knobs = json.loads(config)
    if not set(_BRIEF) <= set(knobs):
        return " ".join(str(v) for v in knobs.values())
    text = "".join(f"{mark}{knobs[name]}" for name, mark in _BRIEF.items())
    rest = [f"{k}={v}" for k, v in knobs.items() if k not in _BRIEF and v not in ("", None)]
    return " ".join([text, *rest])
