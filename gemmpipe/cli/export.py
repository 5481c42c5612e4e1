"""`gemmpipe export`: a finished run's or a table's choices in the form of an engine, and how the engine uses them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.cli import STDOUT, announced, naming_write_errors
from gemmpipe.cli.command_line import CommandLine, gemmpipe_command
from gemmpipe.cli.commands import options
from gemmpipe.core.errors import UserError, suggest
from gemmpipe.core.events import Event, Events, counted
from gemmpipe.core.paths import tables_variable
from gemmpipe.core.shell import shell_join, shell_quote
from gemmpipe.core.text_table import fold_width
from gemmpipe.report.last_run import WITH_SELECTIONS, last_run, named_folder, names_last, suggest_run
from gemmpipe.report.lines import Line, fitted

if TYPE_CHECKING:
    from gemmpipe.engines.install import InstalledFile
    from gemmpipe.engines.launch import ServerArguments
    from gemmpipe.pipeline.export import Choices

HELP = """gemmpipe export RUN|TABLE vllm|sglang|aiter|plugin [output=DIR] [kernel=FAMILY]
gemmpipe export RUN vllm|sglang install=true [package=DIR]
gemmpipe export vllm|sglang undo=true [package=DIR]

Writes what a finished run chose in the form of an engine, without timing again, and prints where the files belong
and the launch line that uses them. RUN is the folder of a run, last, or last~1.

  vllm, sglang   JSON files of the engine's own Triton functions; the run must have timed these (format=[vllm])
  aiter          aiter's table: the rows with kernels of aiter
  plugin         the variables with which gemmpipe's plug-in for vLLM and SGLang uses the run's table

  output=DIR     the folder of the files (outputs/tuned)
  install=true   copy dense files into the engine's package, the only place from which they are read; a
                 replaced file is kept as a backup
  undo=true      restore the engine's own files
  package=DIR    the engine's package, where it is not installed in this Python
  model=MODEL    the model in the printed launch line (that of shapes=engine)
  kernel=FAMILY  the kernel of a table whose name has none
"""
TARGETS = ("vllm", "sglang", "aiter", "plugin")
_OPTIONS = {"output": "", "install": "false", "undo": "false", "package": "", "model": "", "kernel": ""}


@dataclass(frozen=True, kw_only=True)
class _Request:
    place: str
    target: str
    output: str
    install: bool
    undo: bool
    package: str | None
    model: str
    kernel: str
    config_dir: Path | None


def run(line: CommandLine) -> int:
    """Write the files and print how they are used. Returns 0. Raises UserError, EnvironmentProblem."""
    request = _request(line)
    lines = _undo(request) if request.undo else _export(request)
    for text in lines:
        _print(text)
    return 0


def _request(line: CommandLine) -> _Request:
    given = options(line, _OPTIONS)
    flags = {name: _flag(name, given[name]) for name in ("install", "undo")}
    targets = [path for path in line.paths if path.lower() in TARGETS]
    places = [path for path in line.paths if path.lower() not in TARGETS]
    expected = "expected gemmpipe export RUN|TABLE vllm|sglang|aiter|plugin"
    if len(line.paths) == 2 and len(places) == 2:
        raise UserError(f"export: '{line.paths[1]}': {expected}{suggest(line.paths[1], TARGETS)}")
    if len(targets) != 1 or len(places) > 1 or (not places and not flags["undo"]):
        raise UserError(f"export: {' '.join(line.paths) or 'nothing to export'}; {expected}")
    target = targets[0].lower()
    if target not in ("vllm", "sglang") and (flags["install"] or flags["undo"]):
        raise UserError(f"export: {target}: nothing is installed for it; expected vllm or sglang")
    if given["output"] and Path(given["output"]).is_file():
        raise UserError(f"output={given['output']}: a file; expected the folder to write to")
    return _Request(
        place=places[0] if places else "",
        target=target,
        output=given["output"],
        package=given["package"] or None,
        model=given["model"],
        kernel=given["kernel"],
        config_dir=line.config_dir,
        **flags,
    )


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UserError(f"{name}={text}: expected true or false")
    return text.lower() == "true"


def _undo(request: _Request) -> list[str]:
    from gemmpipe.engines.install import undo
    from gemmpipe.engines.packages import dense_folder, package_folder

    folder = dense_folder(request.target, package_folder(request.target, request.package))
    found = undo(folder)
    if not found:
        return [f"{folder}: nothing was installed there"]
    return _installed_lines(folder, found)


def _installed_lines(folder: Path, found: "Sequence[InstalledFile]") -> list[str]:
    lines = []
    for action in dict.fromkeys(each.action for each in found):
        names = [each.path.name for each in found if each.action == action]
        note = " (changed since; delete it, or rename its backup)" if action == "kept" else ""
        kept = sum(each.kept_keys for each in found if each.action == action)
        note += f" (with {counted(kept, 'entry', 'entries')} of the engine's own for other M)" if kept else ""
        lines.append(f"{action} {counted(len(names), 'file')}{note}: {', '.join(names[:3])}{' ...' * (len(names) > 3)}")
    return [f"in {folder}", *(f"  {text}" for text in lines)]


def _export(request: _Request) -> list[str]:
    choices = find_choices("export", request.place, request.kernel, request.config_dir)
    events = Events(listeners=[_print_event])
    if request.target == "aiter":
        return _aiter(request, choices, events)
    lines = _plugin(request, choices, events) if request.target == "plugin" else _engine(request, choices, events)
    _warn_of_provisional_rows(request, choices, events)
    return lines


def _warn_of_provisional_rows(request: _Request, choices: "Choices", events: Events) -> None:
    """Warn where an engine gets rows that were timed on a shared device, or from a search that was cut short."""
    from gemmpipe.tables.merge import provisional_text

    form = "" if request.target == "plugin" else request.target
    chosen = choices.selections[choices.selections["format"].fillna("") == form]
    if "policy" in chosen and (text := provisional_text(chosen["policy"])):
        events.emit("warning", f"{request.target}: {text}; retune=true on an idle device replaces them")


def _print_event(event: Event) -> None:
    if event.kind in ("warning", "line"):
        _print(f"warning: {event.text}" if event.kind == "warning" else event.text)


def _print(text: str) -> None:
    """Print one line; in a terminal in several, except a command to copy."""
    with naming_write_errors(STDOUT):
        for part in fitted(Line(text=text), fold_width(sys.stdout)):
            print(part.text)


def find_choices(command: str, place: str, kernel: str, config_dir: Path | None) -> "Choices":
    """The choices of a run (a folder, `last`, `last~N`), or of a tuned table of this `kernel`, else that of its name.

    Raises UserError if there is neither.
    """
    path, is_last = named_folder(place, f"{command}: {place}"), names_last(place)
    if not is_last and not path.exists():
        expected = "expected the folder of a run, last, or a tuned table"
        raise UserError(f"{command}: no file or folder '{place}'; {expected}{suggest_run(place)}")
    if kernel and not path.is_file():
        raise UserError(f"{command}: kernel: only a table takes it; a run names its kernel")
    if is_last:
        path = last_run(place, (WITH_SELECTIONS,), f"{command}: {place}", "the folder of a run, or a tuned table")
    with announced(f"reading {path}"):
        return _read_choices(path.absolute() if is_last else path, kernel, config_dir)


def _read_choices(path: Path, kernel: str, config_dir: Path | None) -> "Choices":
    """The choices of a table or of a run's folder."""
    from gemmpipe.cli.folders import ConfigFolders
    from gemmpipe.family import shipped_families
    from gemmpipe.pipeline.export import choices_of_run, choices_of_table
    from gemmpipe.report.tables import table_source

    folders = ConfigFolders(config_dir=config_dir)
    folders.make_importable()
    if path.is_file():
        return choices_of_table(table_source(path, kernel or None, frozenset(folders.kernels.values())))
    return choices_of_run(path, {*shipped_families(), *folders.kernels.values()})


def _engine(request: _Request, choices: "Choices", events: Events) -> list[str]:
    from gemmpipe.engines.launch import DENSE, use_lines
    from gemmpipe.formats.engine_filenames import kinds_of_files

    form = _format(request.target, choices)
    if not form.buckets(choices.family, [1]):
        raise UserError(
            f"{request.target}: it reads no tuned files for products of {choices.family.name}; "
            f"expected '{shell_join(['gemmpipe', 'export', *choices.arguments, 'plugin'])}'"
        )
    if request.target not in choices.formats:
        raise UserError(_untimed(request, choices))
    files = choices.write(form, Path(request.output or "outputs/tuned"), events)
    kinds = kinds_of_files(request.target, files)
    folder = Path(request.output or "outputs/tuned") / request.target
    lines = [f"wrote {counted(len(files), 'file')} of {choices.family.name} to {folder}"]
    installed = None
    if request.install:
        if not (dense := kinds.get(DENSE)):
            raise UserError("install: only files of dense products must be copied; a variable names those of experts")
        found = _install(request, dense)
        installed = found[0].path.parent
        lines += _installed_lines(installed, found)
    server = _server(request, request.target, choices)
    command = _command(request)
    return [*lines, *use_lines(server, kinds, folder, export=command, installed=installed, package=request.package)]


def _command(request: _Request) -> list[str]:
    """The arguments of this command, without `install=`."""
    given = {name: getattr(request, name) or "" for name in ("output", "package", "model", "kernel")}
    typed = [f"{name}={value}" for name, value in given.items() if value != _OPTIONS[name]]
    return [*gemmpipe_command(request.config_dir), "export", request.place, request.target, *typed]


def _install(request: _Request, files: Sequence[Path]) -> "list[InstalledFile]":
    from gemmpipe.engines.install import install
    from gemmpipe.engines.packages import dense_folder, package_folder

    return install(files, dense_folder(request.target, package_folder(request.target, request.package)))


def _format(name: str, choices: "Choices"):  # type: ignore[no-untyped-def]
    from gemmpipe.formats.engine_json import Sglang, Vllm

    formats = choices.config.get("format")
    own = formats.get(name) if isinstance(formats, dict) else None
    device_name = own.get("device_name") if isinstance(own, dict) else None
    return {"vllm": Vllm, "sglang": Sglang}[name](device_name=device_name if isinstance(device_name, str) else None)


def _untimed(request: _Request, choices: "Choices") -> str:
    """The refusal of choices that do not contain times of the engine's function."""
    target = request.target
    engine = _format(target, choices).engine()
    functions = engine.implementations(choices.family) if engine is not None else ()
    if choices.is_run and any(function.unavailable(choices.device) for function in functions):
        typed = ["gemmpipe", f"kernel={choices.family.name}", "shapes=...", f"format=[{target}]"]
        return (
            f"{target}: this run was timed on {choices.device.name}, which cannot run {target}'s functions; "
            f"expected a run on a GPU: {shell_join(typed)}"
        )
    if choices.is_run:
        command = [f"reuse={choices.place}", f"format=[{target}]"]
    else:
        command = [f"kernel={choices.family.name}", "shapes=csv", f"shapes.path={choices.place}", f"format=[{target}]"]
    what = "this run" if choices.is_run else "the table"
    return (
        f"{target}: {what} has no times of {target}'s own function, and the fastest kernel of another form has no "
        f"file; expected {shell_join([*gemmpipe_command(request.config_dir), *command])}, which times it"
        f"{_missing_gpu(choices)}"
    )


def _missing_gpu(choices: "Choices") -> str:
    """Where the command that times an engine's function must run, if this machine has no GPU for it."""
    from gemmpipe.core.device import gpu_kind
    from gemmpipe.pipeline.export import architectures_of

    found = [gfx for gfx in architectures_of(choices) if not gfx.startswith("cpu")]
    if not found or gpu_kind() is not None:
        return ""
    return f" on a GPU ({', '.join(found)}); this machine has none"


def _server(request: _Request, engine: str, choices: "Choices") -> "ServerArguments":
    """The server whose products the run tuned, with the model that the user names."""
    from gemmpipe.sources.model.engine import server_for

    return server_for(engine, choices.shapes, request.model or None)


def _aiter(request: _Request, choices: "Choices", events: Events) -> list[str]:
    from gemmpipe.formats.aiter_csv import AiterCsv

    if choices.family.aiter_table is None:
        raise UserError(f"aiter: it has no table of {choices.family.name}")
    files = choices.write(AiterCsv(file=None), Path(request.output or "outputs/tuned"), events)
    if not files:
        raise UserError(
            f"aiter: {choices.place} has no row with a kernel of aiter; expected backend=[aiter] in the run"
        )
    _warn_of_other_devices(choices, events)
    variable = f"AITER_CONFIG_{choices.family.aiter_table.variable}"
    return [f"export {variable}={shell_quote(str(files[0].absolute()))}"]


def _warn_of_other_devices(choices: "Choices", events: Events) -> None:
    """Warn where no row can answer in aiter, which runs on AMD GPUs."""
    from gemmpipe.pipeline.export import architectures_of

    found = architectures_of(choices)
    if found and not any(gfx.startswith("gfx") for gfx in found):
        names = ", ".join(dict.fromkeys("a CPU" if gfx.startswith("cpu") else gfx for gfx in found))
        events.emit("warning", f"aiter: all rows are of {names}: aiter, on an AMD GPU, answers with none of them")


def _plugin(request: _Request, choices: "Choices", events: Events) -> list[str]:
    from gemmpipe.engines.launch import plugin_lines, plugin_switch
    from gemmpipe.engines.packages import ENGINES
    from gemmpipe.pipeline.export import own_table

    table = own_table(choices, Path(request.output) if request.output else None, events).absolute()
    switch = plugin_switch([column.name for column in choices.family.key_columns])
    lines = [f"table {table}", *_answering_rows(table, choices, events)]
    served = choices.shapes.get("engine")
    for engine in [served] if served in ENGINES else ENGINES:
        server = _server(request, str(engine), choices)
        lines += plugin_lines(server, tables_variable(choices.family.name), table, switch)
    return [*lines, *_untimed_libraries(request, choices, [str(served)] if served in ENGINES else ENGINES)]


def _answering_rows(table: Path, choices: "Choices", events: Events) -> list[str]:
    """How many rows a plug-in can use, and why not the others; a warning where it uses none.

    A run timed its own rows, so that only its family and its device can be in the way.
    """
    from gemmpipe.plugins.scope import unserved_reason

    if choices.is_run:
        if reason := unserved_reason(choices.family.name, choices.device.gfx):
            events.emit("warning", f"plugin: no row can answer in an engine: {reason}")
        return []
    from gemmpipe.plugins.tuned_products import count_answering_rows
    from gemmpipe.tables import store

    with announced("checking the kernels of the rows"):
        loaded = store.load(table, choices.family)
        count, reasons = count_answering_rows(choices.family, loaded.rows)
    reasons.update({"not timed": len(loaded.refused)} if loaded.refused else {})
    why = "; ".join(f"{reason} ({rows:,})" for reason, rows in reasons.most_common())
    text = (
        f"{count:,} of {counted(count + reasons.total(), 'row')} can answer in an engine{f'; not: {why}' * bool(why)}"
    )
    if count:
        return [text]
    events.emit("warning", f"plugin: {text}")
    return []


def _untimed_libraries(request: _Request, choices: "Choices", engines: Sequence[str]) -> list[str]:
    """The own libraries of these engines that a run did not time, and the command that does; nothing for a table."""
    from gemmpipe.engines.kernel_choice import BLOCKS
    from gemmpipe.engines.own_kernel import own_kernel
    from gemmpipe.engines.packages import TITLES
    from gemmpipe.family.dtypes import X_SCALE_COLUMN

    if not choices.is_run or X_SCALE_COLUMN not in choices.family.key_columns or choices.shapes.get("own_kernel"):
        return []
    rows = choices.selections[["N", "K"]].drop_duplicates().itertuples(index=False)
    sizes = [(int(n), int(k)) for n, k in rows]
    timed, lines = choices.config.get("backend"), []
    for engine in engines:
        rules = [own_kernel(engine, BLOCKS, choices.device.gfx, size) for size in sizes]
        own = dict.fromkeys(name for rule in rules if rule is not None for name in rule.libraries)
        if missing := [name for name in own if not isinstance(timed, dict) or name not in timed]:
            shapes = ["shapes=engine", f"shapes.engine={engine}", f"shapes.path={request.model or 'MODEL'}"]
            command = shell_join([*gemmpipe_command(request.config_dir), *shapes])
            lines.append(f"not timed: {', '.join(missing)}, which {TITLES[engine]} itself calls; {command} does")
    return lines
