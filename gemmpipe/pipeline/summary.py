"""The summary that a run prints at its end."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.core.events import Event, counted
from gemmpipe.core.paths import RUNS, is_in_runs_folder, shipped_tables, tables_variable
from gemmpipe.core.shell import shell_join, shell_quote
from gemmpipe.core.signals import Interrupted
from gemmpipe.core.text_table import terminal_width
from gemmpipe.core.units import MIN_SHOWN_S, duration_text, time_text
from gemmpipe.engines.packages import ENGINES
from gemmpipe.executors import Usage
from gemmpipe.pipeline.manifest import Reused, reused_rows
from gemmpipe.pipeline.named_backends import chosen_without
from gemmpipe.report.lines import Line, fitted, folded
from gemmpipe.report.results import is_shared, product_results, run_figures
from gemmpipe.report.screen import (
    RunFacts,
    choice_lines,
    choose_again_line,
    command_lines,
    memory_option_lines,
    screen_lines,
    see_lines,
)
from gemmpipe.report.speedup import ABOUT
from gemmpipe.stages.history import native_tables
from gemmpipe.stages.rows import undecided_line
from gemmpipe.stages.workload import saving
from gemmpipe.tables.file_names import table_arguments

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.family import Family
    from gemmpipe.pipeline.plan import Plan
    from gemmpipe.stages import Context

"""Formats that `gemmpipe export` writes for an engine."""
_PARTS_OF_RUN = 2
"""A run's folder is PIPELINE/TIME in the folder of runs; a sweep has its jobs one level below."""
WAITING = "waiting"
"""The activity of a driver whose devices other runs hold."""


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
    """Emit the selections, what they gain, the time by stage and resource, the files, and the next commands.

    `stopped_early`: the run ended before its last problem.
    """
    emit = context.events.emit
    reused = reused_rows(plan, context)
    chosen = _chosen(plan, tables, reused)
    has_choices = chosen is not None and len(chosen) > 0
    ended = f"{'stopped after' if stopped_early else 'done in'} {duration_text(wall_s)}"
    if waited_s := context.stage_seconds.get(f"{WAITING}_s"):
        ended += f", {duration_text(waited_s)} of it waiting for the device"
    if chosen is not None and has_choices:
        _emit_screen(plan, chosen, context, ended, reused, is_stopped=stopped_early)
    for text in _further_lines(plan, tables, context):
        for part in fitted(Line(text=text), terminal_width()):  # also without a terminal, as the screen before them
            _send(context, part)
    worked = len(resources) > 1  # more than the driver
    if again := choose_again_line(tables.get("memory_options"), _reuse_arguments(plan, worked=worked)):
        _emit_whole(context, again)
    # A format that is searched for itself, such as `engine_vllm_s`, shows what it costs.
    engines = any(name.startswith("engine_") and name != "engine_s" for name in context.stage_seconds)
    emit("line" if engines or not has_choices else "detail", _total_line(wall_s, context.stage_seconds))
    for usage in (each for each in resources if worked and each.wall_s >= MIN_SHOWN_S):
        emit("detail", f"  {usage_line(usage)}")
    _emit_whole(context, f"run   {plan.run_dir}")
    unfinished = stopped_early or context.cut_short or context.left or context.undecided
    if worked and unfinished and code != Interrupted.exit_code:  # which names it itself
        _emit_whole(context, f"resume with: {resume_line(plan.run_dir, plan.python_path)}")
    written = []
    if code != Interrupted.exit_code and ("artifacts" in tables or reused):
        written = [path for path in native_tables(plan.family, context.output, plan.formats.values()) if path.is_file()]
    for path in written:
        _emit_whole(context, use_line(plan.family, path.resolve()))
    if has_choices:
        for each in _next_commands(plan, tables, context, written, reused):
            _send(context, each)
    elif "select" in plan.chain and context.unsolved:
        # By its folder: `last` is a run with choices.
        for each in see_lines([f"gemmpipe show {_shown_path(plan.run_dir)}", context.doctor_command], terminal_width()):
            _send(context, each)


def _total_line(wall_s: float, stage_seconds: Mapping[str, float]) -> str:
    """The time of the run and of each stage that took some."""
    spent = {k[:-2]: v for k, v in stage_seconds.items() if "idle" not in k and v >= MIN_SHOWN_S}
    return ", ".join((f"total {duration_text(wall_s)}", *(f"{name} {duration_text(v)}" for name, v in spent.items())))


def _run_name(run_dir: Path) -> str:
    """How a user names this run in the next commands: `last`, unless it is one of a sweep or in another folder."""
    return "last" if _is_last(run_dir) else _shown_path(run_dir)


def _is_last(run_dir: Path) -> bool:
    folder = run_dir.resolve()
    return is_in_runs_folder(run_dir) and len(folder.relative_to(RUNS.resolve()).parts) == _PARTS_OF_RUN


def _shown_path(run_dir: Path) -> str:
    """The folder of a run for a command line, relative to the current folder where it lies below it."""
    return shell_quote(_relative(run_dir))


def _relative(run_dir: Path) -> str:
    folder, here = run_dir.resolve(), Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _next_commands(
    plan: "Plan",
    tables: "Mapping[str, pd.DataFrame]",
    context: "Context",
    written: Sequence[Path],
    reused: Reused | None,
) -> list[Line]:
    """The commands that apply: exports need rows of an engine or a GPU's table, and the shipped tables are a GPU's.

    Rows that an earlier run timed are in its table, from which no form of an engine is written.
    """
    if reused is not None:
        return command_lines(shell_join(table_arguments(reused.table, plan.family)), terminal_width())
    on_gpu = context.device.kind != "cpu"
    timed = set(tables["selections"]["format"]) if "selections" in tables else set()
    engines = [name for name in plan.formats if name in ENGINES and name in timed]
    exports = [*engines, *(["plugin"] if on_gpu and written else [])] if written or engines else []
    shipped = on_gpu and (shipped_tables() / plan.family.csv_name).is_file()
    return command_lines(_run_name(plan.run_dir), terminal_width(), exports=exports, shipped=shipped)


def resume_line(run_dir: Path, python_path: Sequence[str]) -> str:
    """The command that resumes a run."""
    return shell_join(["gemmpipe", *_own_folders(run_dir, python_path), f"resume={run_dir}"])


def _own_folders(run_dir: Path, python_path: Sequence[str]) -> list[str]:
    """The run's --config-dir, which runs user code: a run outside the runs folder needs it on the command line."""
    return [f"--config-dir={folder}" for folder in python_path if not is_in_runs_folder(run_dir)]


def _reuse_arguments(plan: "Plan", *, worked: bool) -> list[str]:
    """The arguments that name the run with the trials: this one, or the one that it reused if it timed nothing."""
    if plan.reuse and not worked:
        run_dir, name = Path(plan.reuse), _relative(Path(plan.reuse))
    else:
        run_dir, name = plan.run_dir, "last" if _is_last(plan.run_dir) else _relative(plan.run_dir)
    return [*_own_folders(run_dir, plan.python_path), f"reuse={name}"]


def use_line(family: "Family", table: Path) -> str:
    """The command that makes `gemmpipe.runtime` read a table."""
    variable = tables_variable(family.name)
    if ":" in str(table):
        return f"{variable} separates tables by ':'; copy {table} to a path without one"
    return f"export {variable}={shell_quote(str(table))}"


def _chosen(plan: "Plan", tables: "Mapping[str, pd.DataFrame]", reused: Reused | None) -> "pd.DataFrame | None":
    """The choices to show: those of this run; where all problems are tuned already, those of the output's table."""
    if "select" not in plan.chain:
        return None  # selections were read from tables
    return reused.rows if reused is not None else tables.get("selections")


def _emit_screen(
    plan: "Plan",
    chosen: "pd.DataFrame",
    context: "Context",
    ended: str,
    reused: Reused | None,
    *,
    is_stopped: bool,
) -> None:
    """Emit the table of choices and the last screen."""
    products = product_results(chosen, plan.family, plan.rooflines)
    for text in choice_lines(products, plan.family, terminal_width(), full=plan.verbose):
        context.events.emit("line", text)
    typed = [each for each in plan.overrides if each.startswith("shapes=")]
    facts = RunFacts(
        kernel=plan.family.name,
        shapes=typed[-1].removeprefix("shapes=").strip("\"'") if typed else "",
        device=context.device.name,
        problems=len(context.already_tuned) if reused else len(context.problems),
        duration=ended,
        reused=str(reused.table) if reused is not None else "",
        unsolved=context.unsolved,
        is_stopped=is_stopped,
    )
    context.events.emit("line", "")
    for each in screen_lines(facts, run_figures(products), products, plan.family):
        for part in folded(each, terminal_width()):  # also without a terminal: a mail or a log
            _send(context, part)
    if reused:
        context.events.emit("line", f"reused {reused.table}; nothing was timed: retune=true tunes these problems again")
        if without := chosen_without(plan, reused.table, reused.run_ids):
            names = ", ".join(without)
            context.events.emit(
                "line", f"  the run that chose these rows was without {names}: retune=true times them too"
            )


def _send(context: "Context", line: Line) -> None:
    context.events.send(Event(kind="line", text=line.text, spans=line.spans, is_whole=line.is_whole))


def _emit_whole(context: "Context", text: str) -> None:
    """Emit a line to copy from: it is not folded."""
    context.events.send(Event(kind="line", text=text, is_whole=True))


def _further_lines(plan: "Plan", tables: "Mapping[str, pd.DataFrame]", context: "Context") -> Iterator[str]:
    """The saving over captured calls, undecided problems, and the final lines of stages."""
    weighted = any(problem.weight != 1 for problem in context.problems)
    if "selections" in tables and "select" in plan.chain and plan.source.counts_calls and weighted:
        yield from saving_lines(tables["selections"])
    if context.undecided:
        budget = context.cpu_budget
        yield undecided_line(context.undecided, context.search, budget.limit_s if budget is not None else None)
    yield from context.final_lines
    if "memory_options" in tables:
        solved = int((tables["selections"]["format"] == "").sum())
        yield from memory_option_lines(tables["memory_options"], solved, terminal_width())


def saving_lines(selections: "pd.DataFrame") -> list[str]:
    """The time that the selections save over the workload's calls, before and after."""
    found = saving(selections)
    if found is None:
        return []
    more = "less" if found.pct >= 0 else "more"
    about = ABOUT if "policy" in selections and any(map(is_shared, selections["policy"])) else ""
    share = f"{about}{abs(found.pct):.{0 if about else 1}f} % {more}"
    change = (
        f" instead of {time_text(found.before_us)}, {share}" if found.after_us != found.before_us else ", as before"
    )
    counts = f"{counted(found.problems, 'problem')}, weighted by calls"
    return [f"calls captured: {time_text(found.after_us)}{change} ({counts})"]


def usage_line(usage: Usage) -> str:
    """One resource's time by activity, longest first; activities of 0.0 s are in the manifest only."""
    longest = sorted(usage.busy_s.items(), key=lambda kv: -kv[1])
    spent = ", ".join(f"{k} {duration_text(v)}" for k, v in longest if v >= MIN_SHOWN_S)
    idle = f"idle {duration_text(usage.idle_s)} of {duration_text(usage.wall_s)}"
    return f"{usage.name}: {spent or 'nothing to do'}; {idle}"
