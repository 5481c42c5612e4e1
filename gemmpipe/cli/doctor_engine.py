"""`gemmpipe doctor engine=vllm`: the kernel of each kind of layer, whether it reads tuned files, and what would win."""

import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.cli import STDOUT, naming_write_errors
from gemmpipe.cli.command_line import CommandLine
from gemmpipe.cli.commands import options
from gemmpipe.core.errors import EnvironmentProblem, UserError, printable, suggest
from gemmpipe.core.events import counted
from gemmpipe.core.paths import tables_variable
from gemmpipe.core.shell import shell_join
from gemmpipe.engines.kernel_choice import (
    BLOCKS,
    EXPERT_ARGUMENTS,
    EXPERTS_BLOCKS,
    EXPERTS_SIXTEEN,
    ROWS,
    SIXTEEN,
    EngineRules,
    LayerChoice,
    LayerRules,
    Situation,
)
from gemmpipe.engines.packages import (
    SGLANG,
    TITLES,
    VLLM,
    check_engine,
    dense_folder,
    installed_version,
    package_folder,
    version_of_package,
)
from gemmpipe.report.lines import Line, fitted
from gemmpipe.report.text_table import fold_width

if TYPE_CHECKING:
    from gemmpipe.engines.server_log import ServerLog
    from gemmpipe.formats.engine_json import EngineJson
    from gemmpipe.pipeline.engine_times import Comparison, OptionTimes
    from gemmpipe.pipeline.export import Choices

HELP = """gemmpipe doctor engine=vllm|sglang [args='--linear-backend triton ...'] [log=server.log] [run=last|DIR|TABLE]

The kernel that the engine uses for each kind of layer on this device, with these arguments and variables; whether it
reads tuned files; and, with run=, what the alternatives take and how to choose the fastest.

  args=...       the server's arguments
  log=FILE       the server's log: its version, arguments, kernels and files
  run=...        a run (or a tuned table) with times of the alternatives
  kernel=FAMILY  the kernel of a table whose name does not tell it
  target=sm_90   the device's architecture, where it is not in this machine
  version=0.33.0 the engine's version, where it is not installed in this Python
  package=DIR    the engine's package, where it is not installed in this Python
"""
_COMMON = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
ARCHITECTURES = ("sm_70", "sm_75", *_COMMON, "sm_86", "sm_87", "sm_101", "sm_110", "sm_121")
"""NVIDIA's architectures with tensor cores (compute capability 7.0 to 12.1)."""
_MISSPELT = 0.88
"""Likeness of two arguments of which one may be the other: less than --tensor-parallel-size and --expert-... have."""
_AMD = re.compile(r"gfx\d{1,2}[0-9a-f]{2}")
_VERSION = re.compile(r"v?\d+(\.\d+)*([.+-]?[a-z]\w*([.+]\w+)*)?")
_OPTIONS = {"engine": "", "args": "", "log": "", "run": "", "kernel": "", "target": "", "version": "", "package": ""}


@dataclass(frozen=True, kw_only=True)
class _Request:
    engine: str
    version: str | None
    rules: EngineRules
    situation: Situation
    package: Path | None
    log: "ServerLog | None"
    unread: tuple[str, ...]
    """Arguments of `args=` that the rules do not depend on."""
    choices: "Choices | None"
    """Those of `run=`."""


def run(line: CommandLine) -> int:
    """Print the report. Returns 0. Raises UserError, EnvironmentProblem."""
    request = _request(line)
    with naming_write_errors(STDOUT):
        for text in _report(request):
            for part in fitted(Line(text=printable(text)), fold_width(sys.stdout)):
                print(part.text)
    return 0


def _request(line: CommandLine) -> _Request:
    given = options(line, _OPTIONS)
    engine = check_engine("engine", given["engine"])
    log = _log(given["log"], engine)
    package = _package(engine, given["package"])
    installed = version_of_package(package) if package is not None else installed_version(engine)
    version = _version(given["version"]) or (log.version if log is not None else None) or installed
    choices = _choices(given["run"], given["kernel"], line.config_dir)
    typed, rules = _flags(given["args"]), _rules(engine, version)
    flags = {**(log.flags if log is not None else {}), **typed}
    situation = Situation(
        gfx=_target(given["target"])
        or (choices.device.gfx if choices is not None and choices.is_run else "")
        or _gfx(),
        flags=flags,
        variables=dict(os.environ),
        packages={} if installed_version(engine) else _assumed_packages(package),
    )
    return _Request(
        engine=engine,
        version=version,
        rules=rules,
        situation=situation,
        package=package,
        log=log,
        unread=tuple(name for name in typed if name not in _arguments(rules)),
        choices=choices,
    )


def _target(given: str) -> str:
    """The architecture that the user names. Raises UserError for one that does not exist."""
    if not given or given in ARCHITECTURES or _AMD.fullmatch(given):
        return given
    known = f"expected an architecture such as {', '.join(_COMMON)}"
    raise UserError(f"target: '{given}' is not known; {known}{suggest(given, ARCHITECTURES)}")


def _version(given: str) -> str:
    """The version that the user names, without a leading v. Raises UserError for a text that is none."""
    if given and not _VERSION.fullmatch(given):
        raise UserError(f"version: '{given}' given; expected numbers such as 0.33.0")
    return given.removeprefix("v")


def _arguments(rules: EngineRules) -> set[str]:
    """The names of the server's arguments on which a choice depends."""
    return {*EXPERT_ARGUMENTS, *(layer.flag.lstrip("-").replace("-", "_") for layer in rules.layers if layer.flag)}


def _unread_line(request: _Request) -> str:
    """The arguments without an effect on the choices, each with the name that may have been meant."""
    known = [f"--{name.replace('_', '-')}" for name in sorted(_arguments(request.rules))]
    texts = []
    for name in request.unread:
        flag = f"--{name.replace('_', '-')}"
        near = difflib.get_close_matches(flag, known, n=1, cutoff=_MISSPELT)
        texts.append(f"{flag} (did you mean '{near[0]}'?)" if near else flag)
    return f"  no choice here depends on {', '.join(texts)}"


def _log(path: str, engine: str) -> "ServerLog | None":
    from gemmpipe.engines.server_log import read_server_log

    if not path:
        return None
    log = read_server_log(Path(path).expanduser())
    if log.engine not in (None, engine):
        raise UserError(f"log={path}: a log of {TITLES[str(log.engine)]}; expected engine={log.engine}")
    return log


def _package(engine: str, given: str) -> Path | None:
    if given:
        return package_folder(engine, given)
    try:
        return package_folder(engine)
    except EnvironmentProblem:
        return None


def _assumed_packages(package: Path | None) -> Mapping[str, bool]:
    """Packages of the engine's environment, which is not this Python: those in its folder; without one, all."""
    if package is None:
        return {
            "deep_gemm": True,
            "vllm.third_party.deep_gemm": True,
            "flashinfer": True,
            "humming": False,
            "b12x": False,
        }
    near = package.parent
    names = ("deep_gemm", "flashinfer", "humming", "b12x")
    found = {name: (near / name).is_dir() for name in names}
    return {**found, "vllm.third_party.deep_gemm": (package / "third_party" / "deep_gemm").is_dir()}


def _flags(text: str) -> dict[str, str]:
    """A server's arguments by name. Raises UserError for a text that is no command line."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"args={text}: {error}; expected a server's arguments") from None
    found: dict[str, str] = {}
    name = ""
    if words and not words[0].startswith("-"):
        raise UserError(f"args: '{words[0]}' given first; expected arguments such as --linear-backend triton")
    for word in words:
        if word.startswith("-"):
            flag, bound, value = word.lstrip("-").partition("=")
            name = flag.replace("-", "_")
            found[name] = value if bound else "true"
        else:
            found[name] = word
    return found


def _gfx() -> str:
    """The architecture of this machine's GPU. Raises EnvironmentProblem if it has none."""
    from gemmpipe.core.device import gpu_device, gpu_kind

    if gpu_kind() is None:
        raise EnvironmentProblem("engine: no GPU here; target=sm_90 names the architecture of the server's")
    return gpu_device(0).gfx


def _rules(engine: str, version: str | None) -> EngineRules:
    """The rules of the newest known version that is not newer; without a version, of the newest."""
    from gemmpipe.engines import sglang_kernels, vllm_kernels

    known: Sequence[EngineRules] = vllm_kernels.RULES if engine == VLLM else sglang_kernels.RULES
    older = [rules for rules in known if version is None or _order(rules.version) <= _order(version)]
    return older[-1] if older else known[0]


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in version.split("+")[0].split(".")[:3])


def _report(request: _Request) -> Iterator[str]:
    title, rules = TITLES[request.engine], request.rules
    known = f"rules of {title} {rules.version}"
    version = request.version or "of unknown version"
    note = "" if request.version == rules.version else f", {known}" + ("" if request.version else " assumed")
    yield f"{title} {version} on {request.situation.gfx}{note}"
    if not request.situation.gfx.startswith("sm_"):
        yield f"  the rules are for NVIDIA devices; {title}'s choice on {request.situation.gfx} is not known here"
        return
    if request.package is None:
        yield f"  {title} is not installed in this Python: DeepGEMM and FlashInfer are assumed to be with it"
    if request.unread:
        yield _unread_line(request)
    for layer in rules.layers:
        yield from _layer_lines(layer, layer.chosen(request.situation), request.log)
    yield from _file_lines(request)
    if request.log is not None:
        yield from _log_lines(request.log, title)
    yield from _time_lines(request)


def _layer_lines(layer: LayerRules, choice: LayerChoice, log: "ServerLog | None") -> Iterator[str]:
    logged = log.kernel_of(layer.kind) if log is not None else None
    rule = next((each for each in layer.kernels if logged in (each.name, each.title, each.backend.upper())), None)
    if logged is not None and rule is None:
        yield f"  {layer.kind:<22} {logged} (the log's; no rule for it here)"
        return
    rule = rule or choice.rule
    if rule is None:
        yield f"  {layer.kind:<22} {choice.note}"
    else:
        files = "reads tuned files" if rule.reads_files else "reads no tuned files"
        how = "the log's" if logged is not None else choice.note
        yield f"  {layer.kind:<22} {rule.title}: {files}" + (f" ({how})" if how else "")
        yield f"      {rule.name}, {rule.source}"
    for passed, reason in choice.passed_over if logged is None else ():
        yield f"      not {passed.title}: {reason}"
    reader = next((each for each in layer.kernels if each.reads_files), None)
    if reader is not None and reader is not rule and (flags := layer.flags_for(reader)):
        yield f"      {reader.title}, which reads them: {' '.join(flags)}"


def _file_lines(request: _Request) -> Iterator[str]:
    from gemmpipe.engines.install import installed_names

    if request.package is None:
        yield "tuned files: package=DIR names the engine's package"
        return
    try:
        folder = dense_folder(request.engine, request.package)
    except EnvironmentProblem as error:
        yield f"tuned files of dense products: {error}"
        return
    files, own = sorted(folder.glob("N=*.json")), len(installed_names(folder))
    yield f"tuned files of dense products: {folder}: {counted(len(files), 'file')}, {own} installed by gemmpipe"
    name = {VLLM: "VLLM_TUNED_CONFIG_FOLDER", SGLANG: "SGLANG_MOE_CONFIG_DIR"}[request.engine]
    value = request.situation.variables.get(name, "")
    yield f"tuned files of experts: {name}{'=' + value if value else ' is not set'}"


def _log_lines(log: "ServerLog", title: str) -> Iterator[str]:
    yield f"log: {counted(len(log.read), 'tuned file')} read, {counted(len(log.missing), 'file')} not found"
    yield from (f"  read {Path(path).name}" for path in log.read[:8])
    yield from (f"  missing {Path(path).name}" for path in log.missing[:8])
    if log.missing:
        yield "  shapes=log shapes.path=LOG tunes what was missing"
    yield from (f"  {line}" for line in log.plugin)
    if not log.plugin:
        yield f"  no line of gemmpipe's plug-in for {title}"


def _choices(place: str, kernel: str, config_dir: Path | None) -> "Choices | None":
    from gemmpipe.cli.export import find_choices

    if kernel and not place:
        raise UserError("doctor: kernel: of a table alone; expected run=TABLE too")
    return find_choices("doctor", place, kernel, config_dir) if place else None


def _time_lines(request: _Request) -> Iterator[str]:
    from gemmpipe.formats.engine_json import Sglang, Vllm
    from gemmpipe.pipeline.engine_times import compare_options

    choices = request.choices
    if choices is None:
        yield "times: run=last (or a run's folder, or a tuned table) compares the alternatives"
        return
    timed = ", ".join(sorted(_timed_on(choices)))
    if timed != request.situation.gfx:
        yield f"times: those of {choices.place} are of {timed or 'an unknown device'}; expected {request.situation.gfx}"
        return
    form = (Vllm if request.engine == VLLM else Sglang)(device_name=None)
    compared = compare_options(choices, request.engine, form)
    if not compared.problems:
        yield f"times: {choices.place} has none"
        return
    layer = request.rules.layer(kind_of(choices, form))
    chosen = layer.chosen(request.situation) if layer is not None else None
    installed = _has_installed_files(request, compared)
    yield f"times of {choices.place}: us of {counted(len(compared.problems), 'product')}, weighted by calls"
    for option in compared.options:
        mark = "  the engine's choice now" if chosen and _is_choice(option, chosen, installed=installed) else ""
        yield f"  {_option_title(option.option, request.engine):<50} {compared.total_us(option):12.1f}{mark}"
    for name in compared.left_out:
        yield f"  {_option_title(name, request.engine):<50} {'not all':>12}"
    if layer is not None:
        yield from _advice(compared, layer, choices, request.engine)


def _timed_on(choices: "Choices") -> set[str]:
    """The architectures on which a run's or a table's rows were timed."""
    if choices.is_run:
        return {choices.device.gfx}
    return {str(gfx) for gfx in choices.selections["gfx"].dropna()} if "gfx" in choices.selections else set()


def kind_of(choices: "Choices", form: "EngineJson") -> str:
    """The kind of layers of a run's family."""
    columns = {column.name for column in choices.family.key_columns}
    if "expert" in columns:
        quantised = choices.selections["q_type"].astype(str).str.contains("1x128").any()
        return EXPERTS_BLOCKS if quantised else EXPERTS_SIXTEEN
    if form.buckets(choices.family, [1]):
        return BLOCKS
    return ROWS if "q_dtype_w" in columns else SIXTEEN


def _has_installed_files(request: _Request, compared: "Comparison") -> bool:
    """True if `gemmpipe export` installed files for all products of a comparison in the engine's package."""
    from gemmpipe.engines.install import installed_names

    if request.package is None:
        return False
    try:
        names = installed_names(dense_folder(request.engine, request.package))
    except EnvironmentProblem:
        return False
    sizes = {tuple(dict(key).get(name) for name in ("N", "K")) for key in compared.problems}
    return all(any(name.startswith(f"N={n},K={k},") for name in names) for n, k in sizes)


def _is_choice(option: "OptionTimes", chosen: LayerChoice, *, installed: bool) -> bool:
    from gemmpipe.pipeline.engine_times import WITH_FILE, WITHOUT_FILE

    if chosen.rule is None:
        return False
    if chosen.rule.reads_files:
        return option.option == (WITH_FILE if installed else WITHOUT_FILE)
    return option.option in chosen.rule.labels


def _option_title(option: str, engine: str) -> str:
    from gemmpipe.pipeline.engine_times import BASELINE, TUNED, WITH_FILE, WITHOUT_FILE

    name = TITLES[engine]
    return {
        BASELINE: "the baseline: the best library without more memory",
        TUNED: "tuned rows, through gemmpipe's plug-in",
        WITH_FILE: f"{name}'s Triton function with the run's file",
        WITHOUT_FILE: f"{name}'s Triton function as it is",
    }.get(option, f"backend {option} alone")


def _advice(compared: "Comparison", layer: LayerRules, choices: "Choices", engine: str) -> Iterator[str]:
    """How to choose the fastest option, and the fastest of the engine's own kernels."""
    from gemmpipe.engines.launch import ServerArguments, plugin_lines, plugin_switch
    from gemmpipe.pipeline.engine_times import TUNED, WITH_FILE, WITHOUT_FILE

    server = ServerArguments(engine=engine)
    reader = next((rule for rule in layer.kernels if rule.reads_files), None)
    for option in compared.options:
        if option.option == TUNED and choices.tables:
            columns = [column.name for column in choices.family.key_columns]
            variable = tables_variable(choices.family.name)
            yield f"fastest: {plugin_lines(server, variable, choices.tables[0].absolute(), plugin_switch(columns))[0]}"
            continue
        rule = next((each for each in layer.kernels if option.option in each.labels), None)
        rule = reader if option.option in (WITH_FILE, WITHOUT_FILE) else rule
        if rule is None:
            continue
        install = shell_join(["gemmpipe", "export", *choices.arguments, engine, "install=true"])
        first = f"{install}; " if option.option == WITH_FILE else ""
        yield f"fastest of the engine's own kernels: {first}{server.command(layer.flags_for(rule))}"
        return
