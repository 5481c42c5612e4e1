"""The summary that a run prints at its end."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.core.events import counted
from gemmpipe.core.paths import is_in_runs_folder, tables_variable
from gemmpipe.core.shell import shell_join, shell_quote
from gemmpipe.core.signals import Interrupted
from gemmpipe.executors import Usage
from gemmpipe.stages.history import native_tables
from gemmpipe.stages.rows import undecided_line
from gemmpipe.stages.workload import saving

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.family import Family, KeyColumn
    from gemmpipe.pipeline.plan import Plan
    from gemmpipe.stages import Context

_MAX_ROWS = 200
_MAX_GATED = 5
_MIN_SHOWN_S = 0.05
"""Times have one decimal: less is 0.0."""


def report_run(
    plan: "Plan",
    tables: "Mapping[str, pd.DataFrame]",
    context: "Context",
    resources: Sequence[Usage],
    wall_s: float,
    code: int,
    *,
    stopped_early: bool,
) -> None:
    """Emit the selections, the time by stage and resource, the files, and the next commands.

    `stopped_early`: the run ended before its last problem.
    """

    def emit_line(text: str) -> None:
        context.events.emit("line", text)

    for line in _result_lines(plan, tables, context):
        emit_line(line)
    emit_line(
        f"total {wall_s:.1f} s"
        + "".join(f", {k[:-2]} {v:.1f}" for k, v in context.stage_seconds.items() if "idle" not in k)
    )
    worked = len(resources) > 1  # more than the driver
    for usage in (each for each in resources if worked and each.wall_s >= _MIN_SHOWN_S):
        emit_line(f"  {usage_line(usage)}")
    emit_line(f"run   {plan.run_dir}")
    if worked and (stopped_early or context.cut_short):
        emit_line(f"resume with: {resume_line(plan.run_dir, plan.python_path)}")
    if code != Interrupted.exit_code and "artifacts" in tables:
        written = [path for path in native_tables(plan.family, context.output, plan.formats.values()) if path.is_file()]
        for path in written:
            emit_line(use_line(plan.family, path.resolve()))


def resume_line(run_dir: Path, python_path: Sequence[str]) -> str:
    """The command that resumes a run; outside the runs folder with its --config-dir, which runs user code."""
    own = [f"--config-dir={folder}" for folder in python_path if not is_in_runs_folder(run_dir)]
    return shell_join(["gemmpipe", *own, f"resume={run_dir}"])


def use_line(family: "Family", table: Path) -> str:
    """The command that makes `gemmpipe.runtime` read a table."""
    variable = tables_variable(family.name)
    if ":" in str(table):
        return f"{variable} separates tables by ':'; copy {table} to a path without one"
    return f"export {variable}={shell_quote(str(table))}"


def _result_lines(plan: "Plan", tables: "Mapping[str, pd.DataFrame]", context: "Context") -> Iterator[str]:
    """Selections and their saving, undecided problems, and the final lines of stages."""
    if "selections" in tables and "select" in plan.chain:  # otherwise they were read from tables
        yield from selection_lines(tables["selections"], plan.family.key_columns)
        yield from saving_lines(tables["selections"])
    if context.undecided:
        yield undecided_line(context.undecided, context.search)
    yield from context.final_lines
    for line in context.gated[:_MAX_GATED]:
        yield f"  rejected (extra weight memory): {line}; raise stages.select.max_extra_weight_pct to allow"
    if more := len(context.gated[_MAX_GATED:]):
        yield f"  rejected (extra weight memory): and {more} more"


def saving_lines(selections: "pd.DataFrame") -> list[str]:
    """The time that the selections save over the workload: time times calls, before and after."""
    found = saving(selections)
    if found is None:
        return []
    more = "less" if found.pct >= 0 else "more"
    return [
        f"select: the workload's calls take {found.after_us / 1e3:.3f} ms instead of {found.before_us / 1e3:.3f}, "
        f"{abs(found.pct):.1f} % {more} ({counted(found.problems, 'problem')}, weighted by calls)"
    ]


def usage_line(usage: Usage) -> str:
    """One resource's time by activity, longest first; activities of 0.0 s are in the manifest only."""
    longest = sorted(usage.busy_s.items(), key=lambda kv: -kv[1])
    spent = ", ".join(f"{k} {v:.1f}" for k, v in longest if v >= _MIN_SHOWN_S)
    return f"{usage.name}: {spent or 'nothing to do'}; idle {usage.idle_s:.1f} of {usage.wall_s:.1f} s"


def selection_lines(selections: "pd.DataFrame", key_columns: "Sequence[KeyColumn]") -> list[str]:
    """An aligned table: problem, chosen candidate, time in us, TFLOP/s, GB/s, ratio to the baseline."""
    own = selections[selections["format"] == ""]
    shown = [c.name for c in key_columns if c.kind == "int" and c.default is None]
    rows = [(*shown, "chosen", "us", "TFLOP/s", "GB/s", "baseline", "ratio")]
    for found in own.head(_MAX_ROWS).to_dict("records"):
        ratio = found["ratio"]
        rows.append(
            (
                *(str(found[name]) for name in shown),
                f"{found['libtype']} {_short(str(found['config']))}",
                f"{found['us']:.2f}",
                f"{found['tflops']:.1f}",
                f"{found['bw']:.0f}",
                str(found["baseline"] or "-"),
                f"{ratio:.3f}" if ratio == ratio and ratio is not None else "-",
            )
        )
    if len(rows) == 1:
        return []
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [_cell(text, widths[i], left=rows[0][i] in ("chosen", "baseline")) for i, text in enumerate(row)]
        lines.append("  ".join(cells))
    if len(own) > _MAX_ROWS:
        lines.append(f"... and {len(own) - _MAX_ROWS} more in selections.csv")
    return lines


def _cell(text: str, width: int, *, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)


_KNOB_MARKS = {
    "BLOCK_SIZE_M": "",
    "BLOCK_SIZE_N": "x",
    "BLOCK_SIZE_K": "x",
    "GROUP_SIZE_M": " g",
    "NUM_KSPLIT": " k/",
    "num_warps": " w",
    "num_stages": " s",
}


def _short(config: str) -> str:
    """Knobs abbreviated: `64x128x128 g1 k/4 w4 s3`; a library's knobs in full."""
    knobs = json.loads(config)
    text = "".join(f"{mark}{knobs[name]}" for name, mark in _KNOB_MARKS.items() if name in knobs).strip()
    rest = {k: v for k, v in knobs.items() if k not in _KNOB_MARKS and v not in ("", None)}
    others = [v if isinstance(v, str) else f"{k}={v}" for k, v in rest.items()]
    return " ".join(part for part in (text, *others) if part)
