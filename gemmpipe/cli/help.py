"""The text of `gemmpipe --help`."""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from gemmpipe.cli.command_line import CommandLine, is_recipe
from gemmpipe.cli.commands import COMMANDS, load_command
from gemmpipe.cli.folders import ConfigFolders, read_text, summary_line
from gemmpipe.core.errors import UserError, suggest_or_list
from gemmpipe.core.paths import shipped
from gemmpipe.core.renamed import OPTIONS
from gemmpipe.core.text_table import MAX_WIDTH, fold_width, terminal_width
from gemmpipe.report.lines import wrapped

_HEAD = """gemmpipe: from a model and a kernel to tuned artifacts that engines load

  gemmpipe kernel=KERNEL shapes=SHAPES ...    the default pipeline, tune
  gemmpipe PIPELINE key=value ...             another pipeline
  gemmpipe path/to/recipe.yaml key=value ...  a recipe: a command line as YAML
  gemmpipe -m kernel=ONE,ANOTHER ...          a sweep, one run per kernel
  gemmpipe resume=last                        resume an interrupted run
"""
_FLAGS = """flags
  -m, --multirun           a sweep over values with commas
  --config-dir DIR         a folder of your own options, pipelines and Python
  --cfg job                print the configuration, run nothing (--cfg job -p space: a part of it)
  --info                   print the sources of the configuration
  -sc install=bash         print the completion for a shell: eval "$(gemmpipe -sc install=bash)"
  --help search            list the options of a group; --help search=halving, --help merge: its file, with all keys
  --version, --help, --hydra-help

Every value is an override: shapes.tp=4 'shapes.nsets=[1,64]' 'space.num_stages=[3,4]' stages.screen.keep=8
Exit codes: 0 done, 1 a problem without a valid candidate (lint: an error in a file), 2 usage error, \
3 environment or device error, 130 interrupted
"""


_ENTRY = re.compile(r"  \S.*?   +(?=\S)")
"""A command or a flag, up to its text."""


_COMMENT = re.compile(r"(^|(?<=\s))(?=# )")


def help_text(folders: ConfigFolders, width: int = MAX_WIDTH) -> str:
    """The help text, with all pipelines and options, in lines of at most `width` characters."""
    pipelines = {name: summary_line(path) for name, path in folders.pipelines.items() if name not in COMMANDS}
    options = {group: ", ".join(names) for group, names in folders.options.items()}
    sections = (
        _HEAD.rstrip().splitlines(),
        ["commands that read runs and files", *_entries(COMMANDS, width)],
        ["pipelines", *_entries(pipelines, width)],
        ["options (group=option)", *_entries(options, width)],
        _FLAGS.rstrip().splitlines(),
    )
    lines = [part for section in sections for text in (*section, "") for part in wrapped(text, width, _indent(text))]
    return "\n".join(lines)


def _entries(texts: Mapping[str, str], width: int) -> Iterator[str]:
    """A name and its text per entry, the text in a column."""
    for name, text in texts.items():
        yield from wrapped(f"  {name:<12} {text}", width, " " * 15)


def _indent(text: str) -> str:
    """The indent of the second line of an entry of the help: its column of texts, or two more than its first line."""
    column = _ENTRY.match(text)
    return " " * (column.end() if column else len(text) - len(text.lstrip()) + 2)


def reflowed(text: str, width: int) -> str:
    """A help text of 120 columns in lines of at most `width`: paragraphs are joined, entries keep their columns."""
    if width >= MAX_WIDTH:
        return text
    lines: list[str] = []
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line[:1].strip() and not line.startswith("gemmpipe "):
            paragraph.append(line)
            continue
        if paragraph:
            lines += wrapped(" ".join(paragraph), width, "")
            paragraph = []
        lines += wrapped(line, width, _indent(line))
    return "\n".join(lines)


def help_topics(line: CommandLine, folders: ConfigFolders) -> list[str]:
    """The arguments of a line with --help that name a group, an option or a pipeline."""
    first = [line.command] if line.command and not is_recipe(line.command) else []
    named = [topic for topic in line.overrides if _group_name(topic) in folders.options]
    return named if named and line.command in folders.pipelines else first + named


def _group_name(topic: str) -> str:
    return topic.partition("=")[0].partition("@")[0].lstrip("+")


def topic_help(topic: str, folders: ConfigFolders) -> str:
    """The options of a group, one per line; for `group=option` its file and those it includes; a pipeline's file.

    Raises UserError for an unknown topic.
    """
    group, name = _group_name(topic), topic.partition("=")[2]
    if topic in COMMANDS:
        return reflowed(load_command(topic).HELP, terminal_width())
    if topic in folders.pipelines:
        more = _to_fit(
            f"gemmpipe {topic} --cfg job prints every key; gemmpipe --help lists pipelines, options, flags", "  "
        )
        path, base = folders.pipelines[topic], shipped("pipelines") / "_base.yaml"
        if topic == "doctor":
            further = reflowed(load_command("doctor_engine").HELP, terminal_width())
        else:
            further = f"# {base}\n# Keys of every pipeline\n{_keys_text(base)}"
        return f"# {path}\n{_file_text(path)}\n{further}\n{more}"
    if group not in folders.options:
        _refuse_knob(topic, folders)
        known = suggest_or_list(group, [*folders.options, *folders.pipelines, *COMMANDS])
        raise UserError(f"--help {topic}: no such group of options, no pipeline and no command{known}")
    if not name:
        texts = {name: summary_line(folders.option_file(group, name)) for name in folders.options[group]}
        start = len(f"  {group}=") + 23
        return "\n".join(_to_fit(f"  {group}={name:<22} {text}", " " * start) for name, text in texts.items())
    if name not in folders.options[group]:
        name = OPTIONS.get(group, {}).get(name) or folders.option_of_part(group, name) or name
    if name not in folders.options[group]:
        raise UserError(f"--help {topic}: no option '{name}'{suggest_or_list(name, folders.options[group])}")
    return "\n".join(_option_files(group, name, folders))


def _refuse_knob(word: str, folders: ConfigFolders) -> None:
    """Raises UserError, which names the help that explains it, for a knob of kernels; does nothing for another word."""
    spaces = folders.options.get("space", ())
    knobs = {space: [key for key in folders.parts("space", space) if key != "when"] for space in spaces}
    knob = next((name for names in knobs.values() for name in names if name.lower() == word.lower()), None)
    if knob is None:
        return
    having = [space for space, names in knobs.items() if knob in names]
    explained = re.compile(rf"^{re.escape(knob)}:.* # ", re.MULTILINE)
    files = {space: folders.option_file("space", space) for space in having}
    shown = next((space for space, path in files.items() if explained.search(read_text(path))), having[0])
    more = f" and {len(having) - 1} more" if len(having) > 1 else ""
    raise UserError(f"--help {word}: {knob} is a knob of space={shown}{more}; expected gemmpipe --help space={shown}")


def _keys_text(path: Path) -> str:
    """The keys that every pipeline has, with their comments; not those that the program and Hydra set."""
    blocks = re.split(r"^(?=\S)", _file_text(path), flags=re.MULTILINE)
    left_out = ("#", "defaults:", "hydra:", "version:", "chain:")
    return "".join(f"{block.rstrip()}\n" for block in blocks if block.strip() and not block.startswith(left_out))


def _to_fit(text: str, indent: str) -> str:
    """A line as it is; in a terminal in lines of its width, all but the first indented."""
    width = fold_width(sys.stdout)
    return text if width is None else "\n".join(wrapped(text, width, indent))


def _file_text(path: Path) -> str:
    """The text of a file; in a terminal long comments continue below the place where they begin."""
    text, width = read_text(path), fold_width(sys.stdout)
    return text if width is None else "".join(f"{part}\n" for line in text.splitlines() for part in _lines(line, width))


def _lines(line: str, width: int) -> list[str]:
    """A line of YAML in lines of at most `width` characters that mean the same: only its comment is broken."""
    comment = _COMMENT.search(line)
    if len(line) <= width or comment is None or line[: comment.end()].count('"') % 2:
        return [line]
    column, indent = comment.end(), " " * (len(line) - len(line.lstrip()))
    if column <= width // 2:
        return wrapped(line, width, " " * column + "# ")
    # Too little room beside the value.
    return [line[:column].rstrip(), *wrapped(indent + line[column:], width, f"{indent}# ")]


def _option_files(group: str, name: str, folders: ConfigFolders) -> list[str]:
    """The text of an option's file, then of those of its group that it includes."""
    path = folders.option_file(group, name)
    tree = yaml.safe_load(read_text(path))
    defaults = tree.get("defaults") or () if isinstance(tree, dict) else ()
    included = [entry for entry in defaults if isinstance(entry, str) and entry != "_self_"]
    return [
        f"# {path}\n{_file_text(path)}",
        *(part for option in included for part in _option_files(group, option, folders)),
    ]
