"""The times of `gemmpipe doctor engine=... run=...`: what the alternatives of an engine take, and which is fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.cli.command_line import gemmpipe_command
from gemmpipe.core.errors import EnvironmentProblem
from gemmpipe.core.events import counted
from gemmpipe.core.paths import tables_variable
from gemmpipe.core.shell import shell_join
from gemmpipe.engines.kernel_choice import (
    BLOCKS,
    EXPERTS_BLOCKS,
    EXPERTS_SIXTEEN,
    ROWS,
    SIXTEEN,
    KernelRule,
    LayerRules,
    Situation,
    SizedChoice,
)
from gemmpipe.engines.packages import TITLES, VLLM, dense_folder

if TYPE_CHECKING:
    from gemmpipe.engines.launch import ServerArguments
    from gemmpipe.formats.engine_json import EngineJson
    from gemmpipe.pipeline.engine_times import Comparison, OptionTimes
    from gemmpipe.pipeline.export import Choices


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """A run (or a table) with times, and the engine whose alternatives they are."""

    engine: str
    choices: "Choices"
    package: Path | None
    """The engine's package."""
    config_dir: Path | None
    model: str | None = None
    """The model in a launch line; None: that of the run's problems."""
    arguments: tuple[str, ...] = ()
    """The server's arguments that the user gives; without any, those that the run's problems are for."""

    @property
    def form(self) -> "EngineJson":
        """The engine's format of files."""
        from gemmpipe.formats.engine_json import Sglang, Vllm

        return (Vllm if self.engine == VLLM else Sglang)(device_name=None)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Those on which its rows were timed, sorted."""
        from gemmpipe.pipeline.export import architectures_of

        return architectures_of(self.choices)

    def of_architecture(self, gfx: str) -> "TimedRun":
        """The rows of one architecture: a table may have several."""
        if self.choices.is_run or len(self.architectures) == 1:
            return self
        rows = self.choices.selections
        return replace(self, choices=replace(self.choices, selections=rows[rows["gfx"] == gfx]))

    def of_sizes(self, sizes: Sequence[tuple[int, int]]) -> "TimedRun":
        """The rows of these (N, K)."""
        rows = self.choices.selections
        mine = [pair in set(sizes) for pair in zip(rows["N"], rows["K"], strict=True)]
        return replace(self, choices=replace(self.choices, selections=rows[mine]))

    def server(self, layer: LayerRules) -> "ServerArguments":
        """The server of a launch line, without the argument that chooses this layer's kernel."""
        from gemmpipe.sources.model.engine import server_for

        server = server_for(self.engine, self.choices.shapes, self.model)
        if not self.arguments:
            return server
        kept: list[str] = []
        for word in self.arguments:
            if word.startswith("-") or not kept or not _is_flag(kept[-1], layer.flag):
                kept.append(word)
        return replace(server, arguments=tuple(word for word in kept if not _is_flag(word, layer.flag)))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers of its products: experts by blocks and in 16 bits, or a single kind."""
        choices = self.choices
        columns = {column.name for column in choices.family.key_columns}
        if "expert" not in columns:
            one = BLOCKS if self.form.buckets(choices.family, [1]) else ROWS if "q_dtype_w" in columns else SIXTEEN
            return (one,)
        by_blocks = set(choices.selections["q_type"].astype(str).str.contains("1x128"))
        return tuple(kind for kind, blocks in ((EXPERTS_BLOCKS, True), (EXPERTS_SIXTEEN, False)) if blocks in by_blocks)

    def of_kind(self, kind: str) -> "TimedRun":
        """The rows of one of its kinds of layers."""
        rows = self.choices.selections
        if kind not in (EXPERTS_BLOCKS, EXPERTS_SIXTEEN):
            return self
        mine = rows["q_type"].astype(str).str.contains("1x128") == (kind == EXPERTS_BLOCKS)
        return replace(self, choices=replace(self.choices, selections=rows[mine]))

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of its dense products, each once; none of experts, whose layers have two products."""
        rows = self.choices.selections
        if not {"N", "K"} <= set(rows.columns):
            return ()
        pairs = zip(rows["N"], rows["K"], strict=True)
        return tuple(sorted({(int(n), int(k)) for n, k in pairs if n == n and k == k and None not in (n, k)}))


def _is_flag(argument: str, flag: str) -> bool:
    """True for an argument with this flag, in any spelling."""
    return bool(flag) and argument.partition("=")[0].replace("_", "-") == flag


def time_lines(
    timed: TimedRun,
    kind: str,
    situation: Situation,
    layer: LayerRules | None,
    chosen: Sequence[SizedChoice],
    *,
    of_model: bool = False,
) -> Iterator[str]:
    """The alternatives for a kind of layers by their times, and how to choose the fastest.

    `layer` has the rules of this kind of layers, `chosen` what the engine chooses now; `of_model`: only products of the
    situation's sizes count.
    """
    from gemmpipe.pipeline.engine_times import compare_options

    place = timed.choices.place
    if situation.gfx not in timed.architectures:
        on = ", ".join(timed.architectures) or "an unknown device"
        yield f"times: those of {place} are of {on}; expected {situation.gfx}"
        return
    timed = timed.of_architecture(situation.gfx).of_kind(kind)
    if of_model and timed.sizes:
        has = set(timed.sizes) & set(situation.sizes)
        yield f"{place} has rows for {len(has)} of the model's {counted(len(situation.sizes), 'size')} of {kind}"
        timed = timed.of_sizes(situation.sizes)
        if not has:
            return
    compared = compare_options(timed.choices, timed.engine, timed.form)
    if not compared.problems:
        yield f"times: {place} has none"
        return
    installed = _has_installed_files(timed, compared)
    counts = "weighted by calls" if compared.is_weighted else "each counted once (no numbers of calls)"
    yield f"times of {place}: us of {counted(len(compared.problems), 'product')} of {kind}, {counts}"
    for option in compared.options:
        mark = _choice_mark(option, chosen, installed=installed)
        yield f"  {_option_title(option.option, timed.engine):<50} {compared.total_us(option):12.1f}{mark}"
    for name in compared.left_out:
        yield f"  {_option_title(name, timed.engine):<50} {'not all':>12}"
    if layer is not None:
        yield from _advice(compared, layer, situation, timed)


def _has_installed_files(timed: TimedRun, compared: "Comparison") -> bool:
    """True if `gemmpipe export` installed files for all products of a comparison in the engine's package."""
    from gemmpipe.engines.install import installed_names

    if timed.package is None:
        return False
    try:
        names = installed_names(dense_folder(timed.engine, timed.package))
    except EnvironmentProblem:
        return False
    sizes = {tuple(dict(key).get(name) for name in ("N", "K")) for key in compared.problems}
    return all(any(name.startswith(f"N={n},K={k},") for name in names) for n, k in sizes)


def _choice_mark(option: "OptionTimes", chosen: Sequence[SizedChoice], *, installed: bool) -> str:
    """Marks the option that the engine chooses, for how many sizes where it does not choose it for all."""
    mine = [each for each in chosen if _is_choice(option, each.rule, installed=installed)]
    if not mine:
        return ""
    of, total = (sum(len(each.sizes) for each in some) for some in (mine, chosen))
    partly = f" for {of} of {counted(total, 'size')}" if total else " for some sizes"
    return f"  the engine's choice now{partly if len(chosen) > 1 else ''}"


def _is_choice(option: "OptionTimes", rule: KernelRule | None, *, installed: bool) -> bool:
    from gemmpipe.pipeline.engine_times import WITH_FILE, WITHOUT_FILE

    if rule is None:
        return False
    if rule.reads_files:
        return option.option == (WITH_FILE if installed else WITHOUT_FILE)
    return option.option in rule.labels


def _option_title(option: str, engine: str) -> str:
    from gemmpipe.pipeline.engine_times import BASELINE, TUNED, WITH_FILE, WITHOUT_FILE

    name = TITLES[engine]
    return {
        BASELINE: "the baseline: the best library without more memory",
        TUNED: "tuned rows, through gemmpipe's plug-in",
        WITH_FILE: f"{name}'s Triton function with the run's file",
        WITHOUT_FILE: f"{name}'s Triton function as it is",
    }.get(option, f"backend {option} alone")


def _advice(compared: "Comparison", layer: LayerRules, situation: Situation, timed: TimedRun) -> Iterator[str]:
    """How to choose the fastest option, and the fastest of the engine's own kernels that computes all sizes."""
    from gemmpipe.engines.launch import plugin_lines, plugin_switch
    from gemmpipe.pipeline.engine_times import TUNED, WITH_FILE, WITHOUT_FILE

    choices, server = timed.choices, timed.server(layer)
    reader = next((rule for rule in layer.kernels if rule.reads_files), None)
    for option in compared.options:
        if option.option == TUNED and situation.expert_parallel and layer.kind in (EXPERTS_BLOCKS, EXPERTS_SIXTEEN):
            yield f"gemmpipe's plug-in leaves experts that are spread over devices to {TITLES[timed.engine]}"
            continue
        if option.option == TUNED and not choices.tables:
            command = [*gemmpipe_command(timed.config_dir), "export", *choices.arguments, "plugin", "output=serve"]
            yield f"fastest: {shell_join(command)}, which writes the table again and prints the launch line"
            continue
        if option.option == TUNED:
            columns = [column.name for column in choices.family.key_columns]
            variable = tables_variable(choices.family.name)
            yield f"fastest: {plugin_lines(server, variable, choices.tables[0].absolute(), plugin_switch(columns))[0]}"
            continue
        rule = next((each for each in layer.kernels if option.option in each.labels), None)
        rule = reader if option.option in (WITH_FILE, WITHOUT_FILE) else rule
        if rule is None or not layer.computes_all(rule, situation):
            continue
        command = [*gemmpipe_command(timed.config_dir), "export", *choices.arguments, timed.engine, "install=true"]
        first = f"{shell_join(command)}; " if option.option == WITH_FILE else ""
        yield f"fastest of the engine's own kernels: {first}{server.command(layer.flags_for(rule))}"
        return
