"""`gemmpipe doctor engine=vllm`: the kernel of each kind of layer, whether it reads tuned files, and what would win."""

import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.cli import STDOUT, naming_write_errors
from gemmpipe.cli.command_line import CommandLine
from gemmpipe.cli.commands import options
from gemmpipe.cli.doctor_times import TimedRun, time_lines
from gemmpipe.core.errors import EnvironmentProblem, UserError, printable, suggest
from gemmpipe.core.events import counted
from gemmpipe.core.files import suggest_path
from gemmpipe.core.shell import shell_join
from gemmpipe.core.text_table import fold_width
from gemmpipe.engines.kernel_choice import (
    EXPERT_ARGUMENTS,
    EXPERTS_BLOCKS,
    EXPERTS_SIXTEEN,
    EngineRules,
    KernelRule,
    LayerChoice,
    LayerRules,
    Situation,
    SizedChoice,
)
from gemmpipe.engines.own_kernel import packages_near, rules_of
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

if TYPE_CHECKING:
    from gemmpipe.engines.server_log import ServerLog
    from gemmpipe.sources.model.engine import ServedModel

HELP = """gemmpipe doctor engine=vllm|sglang [args='--linear-backend triton ...'] [run=last|DIR|TABLE] [model=DIR]
gemmpipe doctor log=server.log [...]

The kernel that the engine uses for each kind of layer on this device, with these arguments and variables; whether it
reads tuned files; and, with run=, what the alternatives take and how to choose the fastest.

  args=...       the server's arguments
  log=FILE       the server's log: its engine, version, arguments, kernels and files
  run=...        a run (or last~1, the run before the last one, or a tuned table) with times of the alternatives
  model=DIR      the config.json of the served model, or its folder: only its layers, with their sizes on one device
  kernel=FAMILY  the kernel of a table whose name has none
  target=sm_90   the device's architecture, where it is not in this machine, and neither the log nor run= names it
  version=0.33.0 the engine's version, where it is not installed in this Python
  package=DIR    the engine's package, where it is not installed in this Python
"""
_COMMON = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
ARCHITECTURES = ("sm_70", "sm_75", *_COMMON, "sm_86", "sm_87", "sm_101", "sm_110", "sm_121")
"""NVIDIA's architectures with tensor cores (compute capability 7.0 to 12.1)."""
_DEVICES = {
    "sm_80": ("A100", "A800"),
    "sm_89": ("L40", "L20", "L4", "RTX 4090", "RTX 6000 Ada"),
    "sm_90": ("H100", "H200", "H20", "H800"),
    "sm_100": ("B200",),
    "sm_103": ("B300",),
    "sm_120": ("RTX PRO 6000", "RTX 5090"),
}
"""Parts of the names of devices that serve models, by architecture."""
_TENSOR_PARALLEL = ("tensor_parallel_size", "tp", "tp_size")
_MISSPELT = 0.88
"""Likeness of two arguments of which one may be the other: less than --tensor-parallel-size and --expert-... have."""
_AMD = re.compile(r"gfx\d{1,2}[0-9a-f]{2}")
_VERSION = re.compile(r"v?\d+(\.\d+)*([.+-]?[a-z]\w*([.+]\w+)*)?")
_OPTIONS = {
    "engine": "",
    "args": "",
    "log": "",
    "run": "",
    "kernel": "",
    "target": "",
    "version": "",
    "package": "",
    "model": "",
}


@dataclass(frozen=True, kw_only=True)
class _Request:
    engine: str
    version: str | None
    rules: EngineRules
    situation: Situation
    package: Path | None
    log: "ServerLog | None"
    log_path: Path
    unread: tuple[str, ...]
    """Arguments of `args=` that the rules do not depend on."""
    timed: TimedRun | None
    """That of `run=`."""
    served: "ServedModel | None"
    """The model of `model=`; None without it."""
    model: str
    """As given by `model=`; empty without it."""
    device_note: str
    """Where the device is from, if neither from `target=` nor from this machine."""

    @property
    def sizes(self) -> Mapping[str, Sequence[tuple[int, int]]] | None:
        """Kind of layers -> (N, K) of the products of the model; None without one."""
        return self.served.sizes if self.served is not None else None


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
    log = _log(given["log"], given["engine"].lower())
    engine = check_engine("engine", given["engine"] or (log.engine if log is not None and log.engine else ""))
    package = _package(engine, given["package"])
    installed = version_of_package(package) if package is not None else installed_version(engine)
    version = _version(given["version"]) or (log.version if log is not None else None) or installed
    timed = _timed(given["run"], given["kernel"], engine, package, line.config_dir)
    typed, rules = _flags(given["args"]), rules_of(engine, version)
    gfx, device_note = _device(given["target"], log, timed)
    flags = {**(log.flags if log is not None else {}), **typed}
    return _Request(
        engine=engine,
        version=version,
        rules=rules,
        situation=Situation(
            gfx=gfx,
            flags=flags,
            variables=dict(os.environ),
            packages={} if installed_version(engine) else packages_near(package),
        ),
        package=package,
        log=log,
        log_path=Path(given["log"]),
        unread=tuple(
            name for name in typed if name not in {*_arguments(rules), *(_TENSOR_PARALLEL if given["model"] else ())}
        ),
        timed=replace(timed, model=_served_model(given["model"]), arguments=tuple(shlex.split(given["args"])))
        if timed is not None
        else None,
        served=_served(engine, given["model"], flags, gfx) if given["model"] else None,
        model=given["model"],
        device_note=device_note,
    )


def _device(target: str, log: "ServerLog | None", timed: TimedRun | None) -> tuple[str, str]:
    """(the architecture, where it is from): that of `target=`, of the log, of the run or table, or of this machine.

    Raises UserError for a target that does not exist, EnvironmentProblem if nothing names a device.
    """
    if target:
        return _target(target), ""
    timed_on = timed.architectures if timed is not None else ()
    if log is not None and (gfx := _architecture(log.device)):
        return gfx, f"{gfx} is the architecture of {log.device}, which the log names; target= names another"
    if timed is not None and len(timed_on) == 1:
        what = "run" if timed.choices.is_run else "table"
        return timed_on[0], f"{timed_on[0]} is the device of the {what}; target= names another"
    return _gfx(timed_on), ""


def _architecture(device: str) -> str:
    """The architecture of a device by its name; empty if it is not known."""
    return next((gfx for gfx, names in _DEVICES.items() if any(name in device for name in names)), "")


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


def _served(engine: str, model: str, flags: Mapping[str, str], gfx: str) -> "ServedModel":
    """A model on one device of the server. Raises UserError."""
    from gemmpipe.sources.model.engine import served_model

    tp = _degree(flags, *_TENSOR_PARALLEL)
    expert_parallel = Situation(gfx=gfx, flags=flags).expert_parallel
    ep = tp if engine == VLLM else _degree(flags, "ep_size", "expert_parallel_size")
    try:
        return served_model(engine, model, tp, ep if expert_parallel else 1, gfx)
    except UserError as error:  # of the source's key, which nobody typed here
        text = str(error)
        raise UserError(f"model{text.removeprefix(key)}" if text.startswith(key := "shapes.path") else text) from None


def _served_model(given: str) -> str | None:
    """The model of a launch line: the folder of a config.json; None for a file of another name."""
    path = Path(given)
    return str(path.parent) if path.name == "config.json" else None if path.suffix == ".json" else given or None


def _degree(flags: Mapping[str, str], *names: str) -> int:
    """The first of these arguments that is given, 1 without one. Raises UserError for one that is no number."""
    name = next((name for name in names if name in flags), None)
    if name is None:
        return 1
    if not flags[name].isdecimal() or not int(flags[name]):
        raise UserError(f"args: --{name.replace('_', '-')} {flags[name]}: expected a whole number from 1")
    return int(flags[name])


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
    if not (file := Path(path).expanduser()).exists():
        raise UserError(f"log={path}: no such file; expected the log of a server{suggest_path(file)}")
    log = read_server_log(file)
    if engine and log.engine not in (None, engine):
        raise UserError(f"log={path}: a log of {TITLES[str(log.engine)]}; expected engine={log.engine}")
    return log


def _package(engine: str, given: str) -> Path | None:
    if given:
        return package_folder(engine, given)
    try:
        return package_folder(engine)
    except EnvironmentProblem:
        return None


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


def _gfx(timed_on: Sequence[str]) -> str:
    """The architecture of this machine's GPU. Raises EnvironmentProblem if it has none, with those of a table."""
    from gemmpipe.core.device import gpu_device, gpu_kind

    if gpu_kind() is None:
        named = f"; the table has rows of {', '.join(timed_on)}" if timed_on else ""
        target = (*timed_on, "sm_90")[0]
        raise EnvironmentProblem(
            f"engine: no GPU here; expected target= with the architecture of the server's GPU (target={target}){named}"
        )
    return gpu_device(0).gfx


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
    if request.device_note:
        yield f"  {request.device_note}"
    if request.unread:
        yield _unread_line(request)
    for layer in rules.layers:
        if request.sizes is not None and layer.kind not in request.sizes:
            yield f"  {layer.kind:<22} none in the model"
            continue
        yield from _layer_lines(layer, _chosen(request, layer))
    if request.served is not None:
        yield from _other_experts(request.served, title)
    yield from _file_lines(request)
    if request.log is not None:
        yield from _log_lines(request.log, request.log_path, title)
    if request.served is not None:
        yield from _tuning_lines(request, request.served, title)
    if request.timed is None:
        yield "times: run=last (or a run's folder, or a tuned table) compares the alternatives"
    else:
        here = request.timed.of_architecture(request.situation.gfx)
        for kind in here.kinds or request.timed.kinds:
            mine = rules.layer(kind)
            chosen = _chosen(request, mine) if mine is not None else ()
            situation, of_model = _situation(request, kind), request.sizes is not None
            yield from time_lines(request.timed, kind, situation, mine, chosen, of_model=of_model)


def _other_experts(served: "ServedModel", title: str) -> Iterator[str]:
    """The line of experts of a kind that the rules do not have; nothing if they have it, or without experts."""
    if served.experts is None or EXPERTS_BLOCKS in served.sizes or EXPERTS_SIXTEEN in served.sizes:
        return
    kind = f"experts, {served.quantization}" if served.quantization else "experts"
    ours = f"no kernel of ours computes them ({served.experts})" if served.experts else "ours compute them"
    yield f"  {kind:<22} {title}'s choice is not known here; {ours}"


def _tuning_lines(request: _Request, served: "ServedModel", title: str) -> Iterator[str]:
    """The commands that tune the model's linear layers and its experts."""
    from gemmpipe.sources.model.engine import sixteen_bit_family
    from gemmpipe.sources.model.keys import EXPERTS_FAMILY

    kernel = () if served.family is not None else (f"kernel={sixteen_bit_family()}",)
    yield f"tunes its products, {title}'s own library among the candidates: {_tuning_command(request, *kernel)}"
    if served.experts == "":
        yield f"tunes its experts: {_tuning_command(request, f'kernel={EXPERTS_FAMILY}')}"


def _tuning_command(request: _Request, *kernel: str) -> str:
    """The command that tunes what the server multiplies; `kernel`: another one than that of the linear layers."""
    tp = _degree(request.situation.flags, *_TENSOR_PARALLEL)
    parallel = [f"shapes.tp={tp}"] if tp > 1 else []
    shapes = ["shapes=engine", f"shapes.engine={request.engine}", f"shapes.path={request.model}", *parallel]
    return shell_join(["gemmpipe", *kernel, *shapes])


def _situation(request: _Request, kind: str) -> Situation:
    """The facts that decide the choice for a kind of layers, with the sizes of the model's or the run's products."""
    if request.sizes is not None:
        return replace(request.situation, sizes=request.sizes.get(kind, ()))
    timed = request.timed.of_architecture(request.situation.gfx) if request.timed is not None else None
    return replace(request.situation, sizes=timed.sizes if timed is not None and kind in timed.kinds else ())


def _chosen(request: _Request, layer: LayerRules) -> Sequence[SizedChoice]:
    """The kernels for a kind of layers: those of the log if it names any, else those of the rules."""
    logged = request.log.kernels_of(layer.kind) if request.log is not None else ()
    if not logged:
        return layer.chosen_by_size(_situation(request, layer.kind))
    found = []
    for name in logged:
        rule = next((each for each in layer.kernels if name in (each.name, each.title, each.backend.upper())), None)
        note = "the log's" if rule is not None else f"{name} (the log's; no rule for it here)"
        found.append(SizedChoice(choice=LayerChoice(kind=layer.kind, rule=rule, passed_over=(), note=note), sizes=()))
    return found


def _layer_lines(layer: LayerRules, chosen: Sequence[SizedChoice]) -> Iterator[str]:
    first, *others = chosen
    rule, total = first.rule, sum(len(each.sizes) for each in chosen)
    if rule is None:
        yield f"  {layer.kind:<22} {first.choice.note}"
    else:
        partly = f"{len(first.sizes)} of {counted(total, 'size')}" if first.sizes and others else ""
        yield f"  {layer.kind:<22} {_kernel_text(rule, first.choice.note, partly)}"
        yield f"      {rule.name}, {rule.source}"
    for passed, reason in first.choice.passed_over:
        yield f"      not {passed.title}: {reason}"
    for other in others:
        text = other.choice.note if other.rule is None else _kernel_text(other.rule, other.choice.note)
        sizes = f"{len(other.sizes)} of {counted(total, 'size')}" if other.sizes else "other sizes"
        yield f"      {sizes}: {text}"
        known = {passed.name for passed, _ in first.choice.passed_over}
        for passed, reason in other.choice.passed_over:
            if passed.name not in known:
                yield f"          not {passed.title}: {reason}"
    reader = next((each for each in layer.kernels if each.reads_files), None)
    if reader is not None and reader is not rule and (flags := layer.flags_for(reader)):
        yield f"      {reader.title}, which reads them: {' '.join(flags)}"


def _kernel_text(rule: KernelRule, *notes: str) -> str:
    noted = ", ".join(note for note in notes if note)
    return f"{rule.title}: reads {'' if rule.reads_files else 'no '}tuned files{f' ({noted})' if noted else ''}"


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


def _log_lines(log: "ServerLog", place: Path, title: str) -> Iterator[str]:
    yield f"log: {counted(len(log.read), 'tuned file')} read, {counted(len(log.missing), 'file')} not found"
    yield from (f"  read {Path(path).name}" for path in log.read[:8])
    yield from (f"  missing {Path(path).name}" for path in log.missing[:8])
    if log.missing:
        yield f"  tunes what was missing: {_command_for_missing(log, place)}"
    yield from (f"  {line}" for line in log.plugin)
    if not log.plugin:
        yield f"  no line of gemmpipe's plug-in for {title}"


def _command_for_missing(log: "ServerLog", place: Path) -> str:
    """The command that tunes the products whose files were missing; names of experts' files lack two sizes."""
    from gemmpipe.family import load_family, shipped_families
    from gemmpipe.formats.engine_json import Sglang, Vllm

    experts = all(Path(path).name.startswith("E=") for path in log.missing)
    form = (Vllm if log.engine == VLLM else Sglang)(device_name=None)
    families = [family for name in shipped_families() if form.buckets(family := load_family(name), [1])]
    mine = [each.name for each in families if experts == any(column.name == "expert" for column in each.key_columns)]
    sizes = ["shapes.model_dim=...", "shapes.topk=..."] if experts else []
    named = [f"kernel={name}" for name in mine[:1]]
    return shell_join(["gemmpipe", *named, "shapes=log", f"shapes.path={place}", *sizes, f"format=[{log.engine}]"])


def _timed(place: str, kernel: str, engine: str, package: Path | None, config_dir: Path | None) -> TimedRun | None:
    """The run or table of `run=`. Raises UserError where it cannot be read."""
    from gemmpipe.cli.export import find_choices

    if kernel and not place:
        raise UserError("doctor: kernel: of a table alone; expected run=TABLE too")
    if not place:
        return None
    choices = find_choices("doctor", place, kernel, config_dir)
    return TimedRun(engine=engine, choices=choices, package=package, config_dir=config_dir)
