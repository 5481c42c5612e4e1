"""What Hydra says about a mistake, in one line: what, where, what was expected, the nearest known name."""

import re
from collections.abc import Mapping, Sequence

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from gemmpipe.cli.reports import one_line
from gemmpipe.cli.words import is_name, key_of
from gemmpipe.errors import UserError, nearest

MISTAKES = (HydraException, OmegaConfBaseException, RecursionError, yaml.YAMLError, ValueError)
"""What composing a configuration raises when the words or the YAML files are wrong."""


_PLUGINS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
"""Launchers that Hydra finds where their package is installed."""


def explain(error: BaseException, options: Mapping[str, Sequence[str]], words: Sequence[str], recipe: str) -> UserError:
    """The mistake as a UserError; `options` are the names in each group, `recipe` the file that the words are from."""
    index = re.match(r"invalid literal for int\(\) with base 10: '(.*)'", str(error))
    if index:  # a name where a list has numbers; Hydra does not say which override it was
        key = next((word.split("=")[0] for word in words if f".{index[1]}" in word.split("=")[0]), "")
        said = f"{key}: no such key; '{index[1]}' stands where a list has only places 0, 1, ..."
    elif (gone := re.match(r"Could not delete '(.*)'\. No match in the defaults", str(error))) and gone[1] in options:
        said = f"~{gone[1]}: cannot be left out; expected {gone[1]}=NAME, or {gone[1]}=[] where several may be chosen"
    elif "group override must be a string" in str(error):  # nor which option it was
        said = _no_name(words, options) or _rest(error)
    elif "Multiple values for" in str(error) and (listed := _list_for_one(words, options)):
        said = listed
    else:
        said = _said(error, options, words)
    return UserError(f"{recipe}: {said}" if recipe else said)


def _no_name(words: Sequence[str], options: Mapping[str, Sequence[str]]) -> str:
    """The first override that gives a group what is no name."""
    for word in words:
        key, group = key_of(word), key_of(word).split("@")[0]
        if group in options and not is_name(word):
            value = word.partition("=")[2]
            return f"{key}: no option '{value}'{nearest(value, options[group])}"
    return ""


def _list_for_one(words: Sequence[str], options: Mapping[str, Sequence[str]]) -> str:
    """The first override that gives a list to a group of which one option is chosen: the two exclude each other."""
    for word in words:
        group, _, value = word.partition("=")
        names = [name.strip("\"' ") for name in value.strip("[]").split(",")]
        if group in options and value.startswith("[") and len(names) > 1:
            return f"{group}: [{', '.join(names)}] given, expected one option; a sweep is -m {group}={','.join(names)}"
    return ""


def _first_unknown(words: Sequence[str], options: Mapping[str, Sequence[str]]) -> str:
    """The first override that names an option which is not there: Hydra looks for the others' in an order of its own.

    Of a kernel that is not there, its backends are not either: a folder of options was forgotten or is another one.
    """
    for word in words:
        group, _, value = word.partition("=")
        for name in value.strip("[]").split(","):
            name = name.strip("\"' ")
            if group in options and re.fullmatch(r"[A-Za-z][\w.-]*", name) and name not in options[group]:
                return f"{group}: no option '{name}'{nearest(name, options[group])}" if is_name(word) else ""
    return ""


def _said(error: BaseException, options: Mapping[str, Sequence[str]], words: Sequence[str]) -> str:
    if isinstance(error, MissingConfigException):
        return _missing_option(error, options, words)
    if isinstance(error, RecursionError):
        return "the defaults lists of the configuration files include each other without end"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as key=value"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return one_line(f"{mark.name}: line {mark.line + 1}: {error.problem}")
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return _wrong_key(cause, options)
    return _rest(error)


def _missing_option(error: MissingConfigException, options: Mapping[str, Sequence[str]], words: Sequence[str]) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    if group not in options:
        if name in _PLUGINS:
            return f"{group}: '{name}' is not installed; pip install {_PLUGINS[name]}"
        known = [str(each) for each in error.options or ()]
        return f"{group}: no option '{name}'{nearest(name, known)}" if known else one_line(str(error).split("\n")[0])
    named = re.match(r"In '([^']+)'", str(error))
    where = f"{named[1]}.yaml: " if named and named[1] != "_base" else ""
    first = "" if where else _first_unknown(words, options)
    return first or f"{where}{group}: no option '{name}'{nearest(name, options[group])}"


def _wrong_key(cause: OmegaConfBaseException, options: Mapping[str, Sequence[str]]) -> str:
    parent = cause.parent_node
    key = str(cause.full_key)
    if "Cannot merge DictConfig with ListConfig" in str(cause):
        return f"{key}: keys and values given, expected a list"
    if "not in struct" not in str(cause) or parent is None:
        return one_line(f"{key}: {str(cause).splitlines()[0]}")
    try:
        known = [str(name) for name in parent if name != "_target_"]  # which belongs to files
    except TypeError:
        return f"{key}: no such key; its parent is a single value"
    last = key.rsplit(".", 1)[-1]
    place = key.rsplit(".", 1)[0] if "." in key else ""
    if place in options and last in options[place] and "_target_" not in parent:  # several may be chosen
        return f"{key}: '{last}' is not chosen; {place}=[{','.join([*known, last])}] adds it"
    return f"{key}: no such key{nearest(last, known)}"


def _rest(error: BaseException) -> str:
    """What is left: Hydra's first line, which names the override, and its suggestion if there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("To append", "Set the environment"))]
    return one_line(" ".join(kept[:2])) or type(error).__name__
