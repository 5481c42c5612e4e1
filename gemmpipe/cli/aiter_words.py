"""The words of aiter's tuning scripts, typed here: each is answered by the word that does it, ready to be pasted."""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from gemmpipe.cli.folders import read_text
from gemmpipe.config import ROOT
from gemmpipe.errors import UserError
from gemmpipe.family import shipped_families
from gemmpipe.paths import shipped

_AMD = ("hipblaslt", "aiter")
_BACKENDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("asm", "ck", "cktile", "both"), ("aiter",)),
    **{name: (name,) for name in ("triton", "torch", "skinny", "hipblaslt")},
}
"""The backends that run a libtype's kernels."""
_NOT_RUN = ("flydsl", "opus")


@dataclass(frozen=True, kw_only=True)
class _Word:
    """What a word of aiter's is here: `here` of its values, words to paste; `note` where nothing is to be pasted."""

    here: Callable[[Sequence[str]], Sequence[str]] = lambda values: ()
    note: str = ""
    many: bool = False
    """Whether it takes all the words that follow it."""
    alone: bool = False
    """Whether it stands alone as a flag; as a key it has a value all the same."""


def _as(*templates: str, alone: bool = False) -> _Word:
    default = "true" if alone else "VALUE"

    def here(values: Sequence[str]) -> list[str]:
        value = values[0] if values else default
        value = {"True": "true", "False": "false", "None": "null"}.get(value, value)
        return [template.format(value) for template in templates]

    return _Word(here=here, alone=alone)


def _listed(values: Sequence[str]) -> str:
    """Values that were typed apart, with commas, or in brackets, as one list."""
    return ",".join(part for value in values for part in value.strip("[]").split(",") if part) or "VALUE"


def _tables(values: Sequence[str]) -> list[str]:
    """aiter writes the first of several files, and reads all."""
    return [f"output={values[0].split(':')[0] if values else 'VALUE'}"]


def _ran(values: Sequence[str]) -> list[str]:
    return ["verify", f"table={values[0] if values else 'VALUE'}"]


def _bool_or_table(values: Sequence[str]) -> list[str]:
    return _ran([value for value in values if value.lower() not in ("true", "false")])


def _libtype(values: Sequence[str]) -> list[str]:
    names = [name for name in _listed(values).split(",") if name not in _NOT_RUN]
    return [f"backend=[{','.join(_of_libtypes(names))}]"] if names else []


def _of_libtypes(names: Sequence[str]) -> list[str]:
    """The backends of libtypes, each once; a name that is none stays."""
    if "all" in names:
        return [*_default_backends(), *_AMD]
    return list(dict.fromkeys(each for name in names for each in _BACKENDS.get(name, (name,))))


def _default_backends() -> list[str]:
    text = read_text(shipped("pipelines") / "_base.yaml")
    defaults = [entry for entry in yaml.safe_load(text)["defaults"] if isinstance(entry, dict)]
    return list(next(entry["backend"] for entry in defaults if "backend" in entry))


def _preshuffled() -> str:
    names = [name for name in shipped_families() if name.endswith("bpreshuffle")]
    return f"the kernel's name says it: kernel={' or kernel='.join(names)}"


_NOTHING = "nothing here does it"
_SHAPES = _as("shapes=csv", "shapes.path={}")
_OUTPUT = _Word(here=_tables)
_INDTYPE, _OUTDTYPE = _as("kernel.dtype={}"), _as("kernel.out_dtype={}")
_SPLITS = _Word(note="splits of K are part of every search; 'space.NUM_KSPLIT=[1]' leaves them out", alone=True)
_MS = _Word(here=lambda values: [f"shapes.nsets=[{_listed(values)}]"], many=True)
_MODEL, _TP = _as("shapes=model", "shapes.path={}"), _as("shapes.tp={}")
_PROFILE, _VERBOSE = _as("profile={}"), _as("verbose={}", alone=True)
_WORDS: Mapping[str, _Word] = {
    "i": _SHAPES,
    "untune_file": _SHAPES,
    "input_file": _SHAPES,
    "o": _OUTPUT,
    "tune_file": _OUTPUT,
    "tuned_file": _OUTPUT,
    "o2": _PROFILE,
    "profile_file": _PROFILE,
    "mp": _as("executor.workers={}"),
    "k": _SPLITS,
    "splitk": _SPLITS,
    "shape_grouped": _Word(note="the candidates of a problem are timed on one GPU always", alone=True),
    "sort": _as("format.csv.sort={}", alone=True),
    "errratio": _as("stages.bench.err_ratio={}"),
    "batch": _as("batch={}"),
    "all": _as("retune={}", alone=True),
    "retune": _as("retune={}", alone=True),
    "warmup": _as("stages.bench.timer.warmup={}"),
    "iters": _as("stages.bench.timer.iters={}"),
    "timeout": _as("executor.timeout_s={}"),
    "run_config": _Word(here=_bool_or_table),
    "compare": _Word(here=lambda values: ["compare"], alone=True),
    "update_improved": _Word(here=lambda values: ["stages.select.min_improvement_pct=3"], alone=True),
    "min_improvement_pct": _as("stages.select.min_improvement_pct={}"),
    "v": _VERBOSE,
    "verbose": _VERBOSE,
    "indtype": _INDTYPE,
    "input_type": _INDTYPE,
    "dtype": _INDTYPE,
    "outdtype": _OUTDTYPE,
    "out_dtype": _OUTDTYPE,
    "bias": _as("kernel.bias={}", alone=True),
    "all_bias": _Word(here=lambda values: ["-m", "kernel.bias=false,true"], alone=True),
    "libtype": _Word(here=_libtype, many=True),
    "with_hipblaslt": _Word(here=lambda values: [f"backend=[{','.join(_default_backends())},hipblaslt]"], alone=True),
    "model_dir": _MODEL,
    "model": _MODEL,
    "tp": _TP,
    "tp_size": _TP,
    "nsets": _MS,
    "batch_size": _MS,
    "batch_sizes": _MS,
    "preshuffle": _Word(note=_preshuffled(), alone=True),
    "blockpercu": _Word(note="a table's row says it, and backend=aiter runs it so", many=True),
    "last": _Word(note=_NOTHING, alone=True),
    "grouped_gemm": _Word(note=_NOTHING, alone=True),
    "mxfp4_flydsl": _Word(note=_NOTHING, alone=True),
    "no_graph": _Word(note="how it is timed is timer@stages.bench.timer=", alone=True),
}
"""By the flag without dashes, in lower case."""
_SHORT = ("i", "o", "o2", "k", "v")
"""Those with one dash."""
_FIRST = ("verify", "compare")
"""Pipelines."""


def _is_flag(word: str, rest: Sequence[str], own: Collection[str]) -> bool:
    """Whether a word is a flag of aiter's scripts; `-i` is theirs where a file follows it."""
    flag, bound, value = word.partition("=")
    if flag == "-i":
        return _is_file(value if bound else next(iter(rest), ""))
    return flag not in own and _known(flag) is not None


def _is_file(word: str) -> bool:
    named = word.endswith(".csv") or "/" in word or "*" in word
    return "=" not in word and not word.startswith("-") and (named or (bool(word) and Path(word).is_file()))


def _known(flag: str) -> _Word | None:
    name = flag.lstrip("-").replace("-", "_").lower()
    return _WORDS.get(name) if flag.startswith("--") != (name in _SHORT) else None


def check_flags(argv: Sequence[str], own: Collection[str]) -> None:
    """Raises UserError for flags of aiter's: what they all are here, in one line. `own` are the flags that are ours."""
    typed: list[str] = []
    here: list[str] = []
    notes: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or not _is_flag(word, rest, own):
            continue
        flag, bound, value = word.partition("=")
        known = _known(flag)
        assert known is not None
        values = [value] if bound else _values(known, rest)
        typed.append(" ".join([word, *([] if bound else values)]))
        here += known.here(values)
        if known.note:
            notes.append(f"{flag}: {known.note}" if len(argv) > 1 else known.note)
    if not typed:
        return
    said = [f"here {_pasted(here)}"] if here else []
    plural = "flags" if len(typed) > 1 else "a flag"
    raise UserError("; ".join([f"{' '.join(typed)}: {plural} of aiter's", *said, *notes, *_not_run(typed)]))


def _values(known: _Word, rest: list[str]) -> list[str]:
    """The words that belong to a flag, taken from those that follow it."""
    values: list[str] = []
    while rest and not rest[0].startswith("-") and (known.many or not values):
        if "=" in rest[0] or (known.alone and rest[0] not in ("True", "False", "true", "false")):
            break
        values.append(rest.pop(0))
    return values


def _pasted(words: Sequence[str]) -> str:
    """The words for a shell; a pipeline comes before them, as in a whole command."""
    ordered = sorted(dict.fromkeys(words), key=lambda word: word not in _FIRST)
    command = ["gemmpipe"] if ordered[0] in _FIRST else []
    return " ".join(map(shlex.quote, [*command, *ordered]))


def _not_run(typed: Sequence[str]) -> list[str]:
    said = [name for name in _NOT_RUN if any(name in each.replace(",", " ").split() for each in typed)]
    return [f"no backend here runs {name}" for name in said]


def check_words(words: Sequence[str], options: Mapping[str, Sequence[str]]) -> None:
    """Raises UserError for a `key=value` in aiter's words: a key of its scripts, a libtype, files with colons."""
    for word in words:
        key, _, value = word.partition("=")
        if key == "backend":
            _check_backends(value, options["backend"])
        elif key in ("inputs", "shapes.path") and ":" in value and not Path(value).exists():
            files = [part for part in value.strip("[]").split(":") if part]
            if len(files) > 1 and all(part.endswith(".csv") for part in files):
                listed = shlex.quote(f"{key}=[{','.join(files)}]")
                raise UserError(f"{key}: several files are a list: {listed}")
        elif key.split(".")[0].split("@")[0] not in {*options, *ROOT} and len(key) > 1:
            known = _known(f"--{key}")
            if known is not None:
                here = known.here([value] if value else [])
                said = [f"here {_pasted(here)}"] if here else [known.note] if known.note else []
                raise UserError("; ".join([f"{word}: a word of aiter's", *said, *_not_run([value])]))


def _check_backends(value: str, known: Sequence[str]) -> None:
    names = [name.strip("\"' ") for name in value.strip("[]").split(",")]
    strange = [name for name in names if name not in known and name in (*_BACKENDS, *_NOT_RUN, "all")]
    if not strange:
        return
    if strange[0] in _NOT_RUN:
        raise UserError(f"backend: no option '{strange[0]}': no backend here runs {strange[0]}")
    listed = shlex.quote(f"backend=[{','.join(_of_libtypes(names))}]")
    what = "leave it out for what an installation has; with AMD's" if strange[0] == "all" else "its kernels are run by"
    raise UserError(f"backend: no option '{strange[0]}'; {what} {listed}")
