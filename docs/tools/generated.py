"""Reference texts that the site's build makes from the program's own files: commands, options and their keys.

A page of `docs/` has a line `<!-- generated: NAME -->`, which `hook.py` replaces by the text of `GENERATED[NAME]`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import yaml
from yaml_keys import Key, OptionFile, read_option

from gemmpipe.cli.commands import COMMANDS, load_command
from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.cli.help import help_text
from gemmpipe.core.paths import shipped

MARK = "<!-- generated: {} -->"
FOLDERS = ConfigFolders(config_dir=None)


def commands() -> str:
    """The commands that read runs and files, with their help."""
    parts = []
    for name, summary in COMMANDS.items():
        usage = load_command(name).HELP.strip()
        parts.append(f"### `gemmpipe {name}`\n\n{_sentence(summary)}\n\n```text\n{usage}\n```\n")
    return "\n".join(parts)


def pipelines() -> str:
    """The pipelines: title, stages in order, and the options that differ from those of every pipeline."""
    parts = []
    for name, path in FOLDERS.pipelines.items():
        option = read_option(path)
        chain = yaml.safe_load(path.read_text()).get("chain") or []
        stages = " → ".join(f"`{stage}`" for stage in chain) or "none"
        parts.append(f"### `gemmpipe {name}`\n\n{_sentence(option.title)}\n\nStages: {stages}.")
        own = [entry for entry in option.includes if entry != "_base"]
        if own:
            parts.append("Its own options: " + ", ".join(f"`{entry.removeprefix('override ')}`" for entry in own) + ".")
        rest = [key for key in option.keys if key.path != "chain"]
        if rest:
            parts.append(_table(rest, ""))
    return "\n\n".join(parts) + "\n"


def base_keys() -> str:
    """The keys of every pipeline and their defaults."""
    return _table(read_option(shipped("pipelines") / "_base.yaml").keys, "") + "\n"


def default_options() -> str:
    """The option of each group that every pipeline begins with."""
    defaults = yaml.safe_load((shipped("pipelines") / "_base.yaml").read_text())["defaults"]
    rows = [entry for entry in defaults if isinstance(entry, dict) and not next(iter(entry)).startswith("override")]
    lines = ["| option | default |", "|---|---|"]
    for row in rows:
        ((group, option),) = row.items()
        shown = ", ".join(option) if isinstance(option, list) else option
        lines.append(f"| `{group}` | `{shown}` |")
    return "\n".join(lines) + "\n"


def help_page() -> str:
    """The text of `gemmpipe --help`."""
    return f"```text\n{help_text(FOLDERS).strip()}\n```\n"


def options(group: str) -> str:
    """All options of a group: title, options that they include, and a table of their keys."""
    shared = sorted(path.stem for path in (shipped("conf") / group).glob("_*.yaml"))
    names = [*FOLDERS.options[group], *shared]
    read = {name: read_option(shipped("conf") / group / f"{name}.yaml") for name in names}
    public = [f"| `{group}={name}` | {_cell(read[name].title)} |" for name in FOLDERS.options[group]]
    index = "\n".join(["| option | content |", "|---|---|", *public])
    sections = [_option(group, name, option) for name, option in read.items() if option.keys]
    return "\n\n".join([index, *sections]) + "\n"


def _option(group: str, name: str, option: OptionFile) -> str:
    included = [entry for entry in option.includes if ":" not in entry]
    also = f"Includes {', '.join(f'`{entry}`' for entry in included)}." if included else ""
    title = f"### `{group}={name}`" if not name.startswith("_") else f"### `{name}` (included by others of `{group}`)"
    keys = [key for key in option.keys if key.path != "_target_"]
    return "\n\n".join(filter(None, [title, _sentence(option.title), also, _table(keys, _prefix(group, name))]))


def _prefix(group: str, name: str) -> str:
    """The path at which the keys of an option are, as typed on the command line."""
    if group in ("stage", "timer"):
        packages = sorted(_packages(group, name))
        return f"{packages[0]}." if packages else f"{group}."
    return f"{group}."


def _packages(group: str, name: str) -> Iterator[str]:
    """The packages at which pipelines place an option of `stage` or `timer`."""
    for path in shipped("pipelines").glob("*.yaml"):
        for entry in yaml.safe_load(path.read_text()).get("defaults") or ():
            if not isinstance(entry, dict):
                continue
            ((place, option),) = entry.items()
            kind, at, package = str(place).removeprefix("override ").partition("@")
            if at and kind == group and option == name:
                yield package


def _table(keys: Iterable[Key], prefix: str) -> str:
    rows = [
        f"| `{prefix}{key.path}` | {_value(key)} | {_cell(key.comment)} |"
        for key in keys
        if not key.path.endswith("_target_")
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) if rows else ""


def _value(key: Key) -> str:
    text = key.value.replace("|", "\\|")
    return f"`{text}`" if text and text != "..." else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _sentence(text: str) -> str:
    """A title as a sentence."""
    text = _cell(text.strip()).replace("[", "\\[")  # no link
    return "" if not text else text[0].upper() + text[1:] + ("" if text.endswith((".", ":")) else ".")


def _groups() -> Mapping[str, Callable[[], str]]:
    return {f"options {group}": lambda group=group: options(group) for group in FOLDERS.options}


GENERATED: Mapping[str, Callable[[], str]] = {
    "commands": commands,
    "pipelines": pipelines,
    "base keys": base_keys,
    "default options": default_options,
    "help": help_page,
    **_groups(),
}
"""The text of each generated part by its name."""


def inserted(page: str) -> str:
    """A page's text with the generated parts in place of their marks. Raises KeyError for an unknown name."""
    lines = []
    for line in page.split("\n"):
        name = line.strip().removeprefix("<!-- generated: ").removesuffix(" -->")
        lines.append(GENERATED[name]() if line.strip() == MARK.format(name) else line)
    return "\n".join(lines)


def pages(docs: Path) -> dict[Path, str]:
    """The text of every page below `docs` by its path, as the site shows it."""
    return {path: inserted(path.read_text()) for path in sorted(docs.rglob("*.md"))}
