"""What Hydra says about a mistake, in one line: what, where, what was expected, the nearest known name.

How a run that failed ends: one line on stderr and an exit code.
"""

import errno
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.cli import tolerating_closed_pipes
from gemmpipe.core.errors import EnvironmentProblem, GemmpipeError, UserError, printable, shortened, suggest_or_list
from gemmpipe.core.renamed import take_notices
from gemmpipe.family.guard import error_location

if TYPE_CHECKING:
    from hydra.errors import MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

EXIT_INTERRUPTED = 130
_MAX_LINE = 500
"""Characters of an error: it may name a path or a column of any length."""


def terminal_line(text: str) -> str:
    """A text without line breaks, runs of blanks, or what a terminal takes for a command; its middle may be cut."""
    return shortened(printable(" ".join(text.split())), _MAX_LINE)


def report_error(error: GemmpipeError, cause: BaseException | None = None) -> int:
    """Say in one line what went wrong (all of it with GEMMPIPE_DEBUG) and return the exit code."""
    with tolerating_closed_pipes():
        _debug(cause or error)
        for notice in take_notices():
            print(f"warning: {terminal_line(notice)}", file=sys.stderr)
        print(f"gemmpipe: {terminal_line(str(error))}", file=sys.stderr, flush=True)
    return error.exit_code


def report_bug(error: Exception, config_dir: Path | None = None) -> int:
    """The same for an error nobody meant to raise; never the code of a run that ended well."""
    return report_error(as_bug(error, config_dir), error)


def system_error(error: OSError) -> GemmpipeError:
    """What the system refused as one that can be told: of which file, where it says so.

    A name that no file can have was typed, or stands in a file: that is a mistake in the words.
    """
    text = error.strerror or str(error)
    if error.filename is None:  # no more processes or open files, say
        return EnvironmentProblem(f"{text} (GEMMPIPE_DEBUG=1 prints the traceback)")
    if error.errno == errno.ENAMETOOLONG:
        return UserError(f"{shortened(str(error.filename))}: {text}")
    return EnvironmentProblem(f"{error.filename}: {text}")


def as_bug(error: Exception, config_dir: Path | None = None) -> GemmpipeError:
    """An error nobody meant to raise as one that can be told.

    Where it came out of a Python file of the user's own folder it is the user's, and the line says which.
    """
    place = error_location(config_dir, error) if config_dir else ""
    text = terminal_line(f"{place or 'internal error'}: {type(error).__name__}: {error}")
    return (UserError if place else EnvironmentProblem)(f"{text} (GEMMPIPE_DEBUG=1 prints the traceback)")


def _debug(error: BaseException) -> None:
    if os.environ.get("GEMMPIPE_DEBUG"):
        traceback.print_exception(error)


def config_errors() -> tuple[type[Exception], ...]:
    """What composing a configuration raises when the words or the YAML files are wrong; loads Hydra."""
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return HydraException, OmegaConfBaseException, RecursionError, yaml.YAMLError, ValueError


_PLUGINS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
"""Launchers that Hydra finds where their package is installed."""


def as_user_error(
    error: BaseException, options: Mapping[str, Sequence[str]], overrides: Sequence[str], recipe: str
) -> UserError:
    """The mistake as a UserError; `options` are the names in each group, `recipe` the file that the words are from."""
    index = re.match(r"invalid literal for int\(\) with base 10: '(.*)'", str(error))
    if index:  # a name where a list has numbers; Hydra does not say which override it was
        key = next((word.split("=")[0] for word in overrides if f".{index[1]}" in word.split("=")[0]), "")
        said = f"{key}: no such key; '{index[1]}' stands where a list has only places 0, 1, ..."
    elif (gone := re.match(r"Could not delete '(.*)'\. No match in the defaults", str(error))) and gone[1] in options:
        said = f"~{gone[1]}: cannot be left out; expected {gone[1]}=NAME, or {gone[1]}=[] where several may be chosen"
    elif "group override must be a string" in str(error):  # nor which option it was
        said = _non_name_override(overrides, options) or _hydra_message(error)
    elif "Multiple values for" in str(error) and (listed := _list_override(overrides, options)):
        said = listed
    else:
        said = _describe(error, options, overrides)
    return UserError(f"{recipe}: {said}" if recipe else said)


def _non_name_override(overrides: Sequence[str], options: Mapping[str, Sequence[str]]) -> str:
    """The first override that gives a group what is no name."""
    from gemmpipe.cli.overrides import is_text_or_list, override_key

    for word in overrides:
        key, group = override_key(word), override_key(word).split("@")[0]
        if group in options and not is_text_or_list(word):
            value = word.partition("=")[2]
            return f"{key}: no option '{value}'{suggest_or_list(value, options[group])}"
    return ""


def _list_override(overrides: Sequence[str], options: Mapping[str, Sequence[str]]) -> str:
    """The first override that gives a list to a group of which one option is chosen: the two exclude each other."""
    for word in overrides:
        group, _, value = word.partition("=")
        names = [name.strip("\"' ") for name in value.strip("[]").split(",")]
        if group in options and value.startswith("[") and len(names) > 1:
            return f"{group}: [{', '.join(names)}] given, expected one option; a sweep is -m {group}={','.join(names)}"
    return ""


def _unknown_option_override(overrides: Sequence[str], options: Mapping[str, Sequence[str]]) -> str:
    """The first override that names an option which is not there: Hydra looks for the others' in an order of its own.

    Of a kernel that is not there, its backends are not either: a folder of options was forgotten or is another one.
    """
    from gemmpipe.cli.overrides import is_text_or_list

    for word in overrides:
        group, _, value = word.partition("=")
        for name in value.strip("[]").split(","):
            name = name.strip("\"' ")
            if group in options and re.fullmatch(r"[A-Za-z][\w.-]*", name) and name not in options[group]:
                return (
                    f"{group}: no option '{name}'{suggest_or_list(name, options[group])}"
                    if is_text_or_list(word)
                    else ""
                )
    return ""


def _describe(error: BaseException, options: Mapping[str, Sequence[str]], overrides: Sequence[str]) -> str:
    import yaml
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, MissingConfigException):
        return _missing_option(error, options, overrides)
    if isinstance(error, RecursionError):
        return "the defaults lists of the configuration files include each other without end"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as key=value"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return terminal_line(f"{mark.name}: line {mark.line + 1}: {error.problem}")
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return _wrong_key(cause, options)
    return _hydra_message(error)


def _missing_option(
    error: "MissingConfigException", options: Mapping[str, Sequence[str]], overrides: Sequence[str]
) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    if group not in options:
        if name in _PLUGINS:
            return f"{group}: '{name}' is not installed; pip install {_PLUGINS[name]}"
        known = [str(each) for each in error.options or ()]
        return (
            f"{group}: no option '{name}'{suggest_or_list(name, known)}"
            if known
            else terminal_line(str(error).split("\n")[0])
        )
    named = re.match(r"In '([^']+)'", str(error))
    where = f"{named[1]}.yaml: " if named and named[1] != "_base" else ""
    first = "" if where else _unknown_option_override(overrides, options)
    return first or f"{where}{group}: no option '{name}'{suggest_or_list(name, options[group])}"


def _wrong_key(cause: "OmegaConfBaseException", options: Mapping[str, Sequence[str]]) -> str:
    parent = cause.parent_node
    key = str(cause.full_key)
    if "Cannot merge DictConfig with ListConfig" in str(cause):
        return f"{key}: keys and values given, expected a list"
    if "not in struct" not in str(cause) or parent is None:
        return terminal_line(f"{key}: {str(cause).splitlines()[0]}")
    try:
        known = [str(name) for name in parent if name != "_target_"]  # which belongs to files
    except TypeError:
        return f"{key}: no such key; its parent is a single value"
    last = key.rsplit(".", 1)[-1]
    place = key.rsplit(".", 1)[0] if "." in key else ""
    if place in options and last in options[place] and "_target_" not in parent:  # several may be chosen
        return f"{key}: '{last}' is not chosen; {place}=[{','.join([*known, last])}] adds it"
    return f"{key}: no such key{suggest_or_list(last, known)}"


def _hydra_message(error: BaseException) -> str:
    """What is left: Hydra's first line, which names the override, and its suggestion if there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("To append", "Set the environment"))]
    return terminal_line(" ".join(kept[:2])) or type(error).__name__
