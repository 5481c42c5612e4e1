"""What `gemmpipe --help` prints."""

import yaml

from gemmpipe.cli.command_line import CommandLine, is_recipe
from gemmpipe.cli.folders import ConfigFolders, read_text, summary_line
from gemmpipe.core.errors import UserError, suggest_or_list

_HEAD = """gemmpipe: from a model and a kernel to tuned artifacts that inference engines load

  gemmpipe kernel=KERNEL shapes=SHAPES ...             the default pipeline, tune
  gemmpipe PIPELINE key=value ...                      another pipeline
  gemmpipe path/to/recipe.yaml key=value ...           a command line written down
  gemmpipe -m kernel=ONE,ANOTHER ...                   a sweep, one run each
  gemmpipe resume=last                                 go on after a kill
  gemmpipe lint FILE-OR-FOLDER ...                     what is wrong with engines' files of configurations
"""
_FLAGS = """flags
  -m, --multirun           a sweep over values with commas
  --config-dir DIR         a folder of your own options, pipelines and Python
  --cfg job                print the configuration, run nothing (--cfg job -p space: a part of it)
  --info                   print where the configuration comes from
  -sc install=bash         print the completion for a shell: eval "$(gemmpipe -sc install=bash)"
  --help search            what each option of a group is; --help search=halving, --help merge: its file, with every key
  --version, --help, --hydra-help

Every value is an override: shapes.tp=4 'shapes.nsets=[1,64]' 'space.num_stages=[3,4]' stages.screen.keep=8
Exit codes: 0 done, 1 a problem without a valid candidate (lint: an error in a file), 2 a mistake in the words,
3 the machine, 130 interrupted
"""


def help_text(folders: ConfigFolders) -> str:
    """The help text, with the pipelines and the options that there are."""
    pipelines = "\n".join(f"  {name:<12} {summary_line(path)}" for name, path in folders.pipelines.items())
    options = "\n".join(f"  {group:<12} {', '.join(names)}" for group, names in folders.options.items())
    return f"{_HEAD}\npipelines\n{pipelines}\n\noptions (group=option)\n{options}\n\n{_FLAGS}"


def help_topics(line: CommandLine, folders: ConfigFolders) -> list[str]:
    """The words that name a group, an option or a pipeline; the rest of a line with --help says nothing."""
    first = [line.command] if line.command and not is_recipe(line.command) else []
    named = [word for word in line.overrides if _group_name(word) in folders.options]
    return named if named and line.command in folders.pipelines else first + named


def _group_name(word: str) -> str:
    return word.partition("=")[0].partition("@")[0].lstrip("+")


def topic_help(word: str, folders: ConfigFolders) -> str:
    """The options of a group, a line each; for `group=option` its file, and those that it builds on; a pipeline's file.

    Raises UserError where there is none.
    """
    group, name = _group_name(word), word.partition("=")[2]
    if word in folders.pipelines:
        more = f"gemmpipe {word} --cfg job prints every key; gemmpipe --help lists pipelines, options and flags"
        return f"# {folders.pipelines[word]}\n{read_text(folders.pipelines[word])}\n{more}"
    if group not in folders.options:
        known = suggest_or_list(group, [*folders.options, *folders.pipelines])
        raise UserError(f"--help {word}: no such group of options, and no pipeline{known}")
    if not name:
        return "\n".join(
            f"  {group}={name:<22} {summary_line(folders.option_file(group, name))}" for name in folders.options[group]
        )
    if name not in folders.options[group]:
        raise UserError(f"--help {word}: no option '{name}'{suggest_or_list(name, folders.options[group])}")
    return "\n".join(_option_files(group, name, folders))


def _option_files(group: str, name: str, folders: ConfigFolders) -> list[str]:
    """The text of an option's file, then of those of its group that it builds on."""
    path = folders.option_file(group, name)
    text = read_text(path)
    tree = yaml.safe_load(text)
    below = [each for each in (tree.get("defaults") or () if isinstance(tree, dict) else ()) if isinstance(each, str)]
    return [
        f"# {path}\n{text}",
        *(part for each in below if each != "_self_" for part in _option_files(group, each, folders)),
    ]
