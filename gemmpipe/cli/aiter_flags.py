"""Flags and keys of aiter's tuning scripts: refused with the equivalent arguments of gemmpipe, ready to paste."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemmpipe.cli.folders import ConfigFolders
from gemmpipe.core.errors import UserError
from gemmpipe.core.shell import shell_join, shell_quote
from gemmpipe.family import shipped_families
from gemmpipe.pipeline.build import ROOT

_AMD_BACKENDS = ("hipblaslt", "aiter")
_BACKENDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("asm", "ck", "both"), ("aiter",)),
    **{name: (name,) for name in ("triton", "torch", "skinny", "hipblaslt")},
}
"""The backends that run a libtype's kernels."""
_UNSUPPORTED = ("cktile", "flydsl", "opus")


@dataclass(frozen=True, kw_only=True)
class _AiterFlag:
    """An aiter flag: `translate` maps its values to our arguments; `note` explains a flag without an equivalent."""

    translate: Callable[[Sequence[str]], Sequence[str]] = lambda values: ()
    note: str = ""
    takes_many: bool = False
    """True if it takes all arguments that follow it."""
    is_switch: bool = False
    """True if the flag takes no value; as a key it has one."""


def _override(*templates: str, is_switch: bool = False) -> _AiterFlag:
    default = "true" if is_switch else "VALUE"

    def translate(values: Sequence[str]) -> list[str]:
        value = values[0] if values else default
        value = {"True": "true", "False": "false", "None": "null"}.get(value, value)
        return [template.format(value) for template in templates]

    return _AiterFlag(translate=translate, is_switch=is_switch)


def _joined_values(values: Sequence[str]) -> str:
    """Values given separately, with commas, or in brackets, as one list."""
    return ",".join(part for value in values for part in value.strip("[]").split(",") if part) or "VALUE"


def _output(values: Sequence[str]) -> list[str]:
    """aiter writes the first of several files, and reads all."""
    return [f"output={values[0].split(':')[0] if values else 'VALUE'}"]


def _verify(values: Sequence[str]) -> list[str]:
    return ["verify", f"table={values[0] if values else 'VALUE'}"]


def _verify_table(values: Sequence[str]) -> list[str]:
    return _verify([value for value in values if value.lower() not in ("true", "false")])


def _libtype(values: Sequence[str]) -> list[str]:
    names = [name for name in _joined_values(values).split(",") if name not in _UNSUPPORTED]
    return [f"backend=[{','.join(_backends_of(names))}]"] if names else []


def _backends_of(names: Sequence[str]) -> list[str]:
    """The backends of libtypes, without duplicates; unknown names stay."""
    if "all" in names:
        return ["default", *_AMD_BACKENDS]
    return list(dict.fromkeys(each for name in names for each in _BACKENDS.get(name, (name,))))


def _preshuffle_note() -> str:
    names = [name for name in shipped_families() if name.endswith("bpreshuffle")]
    return f"selected by the kernel's name: kernel={' or kernel='.join(names)}"


def _axis(name: str) -> _AiterFlag:
    """A range of `screen.py`: the values of a knob."""

    def translate(values: Sequence[str]) -> list[str]:
        texts = ['""' if value.lower() == "none" else value for value in _joined_values(values).split(",")]
        return [f"space.{name}=[{','.join(texts)}]"]

    return _AiterFlag(translate=translate, takes_many=True)


_NO_EQUIVALENT = "no equivalent"
_SHAPES = _override("shapes=csv", "shapes.path={}")
_OUTPUT = _AiterFlag(translate=_output)
_INDTYPE, _OUTDTYPE = _override("kernel.dtype={}"), _override("kernel.out_dtype={}")
_SPLITS_NOTE = "splits of K are part of every search; 'space.NUM_KSPLIT=[1]' leaves them out"
_SPLITS = _AiterFlag(note=_SPLITS_NOTE, is_switch=True)
_SIZES_NOTE = "sizes are listed: shapes=list 'shapes.items=[[M,N,K]]'"
_SIZES = _AiterFlag(note=_SIZES_NOTE)
_FILES_NOTE = (
    "format=[triton_json] writes a file per (N, K) of the problems, by buckets of M (format.triton_json.buckets=)"
)
_OF_FILES = _AiterFlag(note=_FILES_NOTE, takes_many=True)
_MS = _AiterFlag(translate=lambda values: [f"shapes.nsets=[{_joined_values(values)}]"], takes_many=True)
_MODEL, _TP = _override("shapes=model", "shapes.path={}"), _override("shapes.tp={}")
_PROFILE, _VERBOSE = _override("profile={}"), _override("verbose={}", is_switch=True)
_AITER_FLAGS: Mapping[str, _AiterFlag] = {
    "i": _SHAPES,
    "untune_file": _SHAPES,
    "input_file": _SHAPES,
    "o": _OUTPUT,
    "tune_file": _OUTPUT,
    "tuned_file": _OUTPUT,
    "o2": _PROFILE,
    "profile_file": _PROFILE,
    "mp": _override("executor.workers={}"),
    "k": _AiterFlag(note=f"{_SPLITS_NOTE}; {_SIZES_NOTE}"),
    "s": _SPLITS,
    "splitk": _SPLITS,
    "shape_grouped": _AiterFlag(note="the candidates of a problem are always timed on one GPU", is_switch=True),
    "sort": _override("format.csv.sort={}", is_switch=True),
    "errratio": _override("stages.bench.err_ratio={}"),
    "batch": _override("batch={}"),
    "all": _override("retune={}", is_switch=True),
    "retune": _override("retune={}", is_switch=True),
    "warmup": _override("stages.bench.timer.warmup={}"),
    "iters": _override("stages.bench.timer.iters={}"),
    "timeout": _override("executor.timeout_s={}"),
    "run_config": _AiterFlag(translate=_verify_table),
    "compare": _AiterFlag(translate=lambda values: ["compare"], is_switch=True),
    "update_improved": _AiterFlag(translate=lambda values: ["stages.select.min_improvement_pct=3"], is_switch=True),
    "min_improvement_pct": _override("stages.select.min_improvement_pct={}"),
    "v": _VERBOSE,
    "verbose": _VERBOSE,
    "indtype": _INDTYPE,
    "input_type": _INDTYPE,
    "dtype": _INDTYPE,
    "outdtype": _OUTDTYPE,
    "out_dtype": _OUTDTYPE,
    "bias": _override("kernel.bias={}", is_switch=True),
    "all_bias": _AiterFlag(translate=lambda values: ["-m", "kernel.bias=false,true"], is_switch=True),
    "libtype": _AiterFlag(translate=_libtype, takes_many=True),
    "with_hipblaslt": _AiterFlag(translate=lambda values: ["backend=[default,hipblaslt]"], is_switch=True),
    "model_dir": _MODEL,
    "model": _MODEL,
    "tp": _TP,
    "tp_size": _TP,
    "nsets": _MS,
    "batch_size": _MS,
    "batch_sizes": _MS,
    "preshuffle": _AiterFlag(note=_preshuffle_note(), is_switch=True),
    "blockpercu": _AiterFlag(note="set per row of the table; backend=aiter uses it", takes_many=True),
    "last": _AiterFlag(note=_NO_EQUIVALENT, is_switch=True),
    "grouped_gemm": _AiterFlag(note=_NO_EQUIVALENT, is_switch=True),
    "mxfp4_flydsl": _AiterFlag(note=_NO_EQUIVALENT, is_switch=True),
    "no_graph": _AiterFlag(note="timing is configured by timer@stages.bench.timer=", is_switch=True),
    "hipb_prefer_ratio": _override("stages.select.prefer.hipblaslt={}"),
    "n": _SIZES,
    "b": _SIZES,
    "g": _SIZES,
    "batch_g": _SIZES,
    "kid": _AiterFlag(note=_NO_EQUIVALENT),
    "apply": _AiterFlag(note="a run writes its rows to output= itself", is_switch=True),
    "block_size_m_range": _axis("BLOCK_SIZE_M"),
    "block_size_n_range": _axis("BLOCK_SIZE_N"),
    "block_size_k_range": _axis("BLOCK_SIZE_K"),
    "num_ksplit_range": _axis("NUM_KSPLIT"),
    "group_size_m_range": _axis("GROUP_SIZE_M"),
    "num_warps_range": _axis("num_warps"),
    "num_stages_range": _axis("num_stages"),
    "waves_per_eu_range": _axis("waves_per_eu"),
    "matrix_instr_nonkdim_range": _axis("matrix_instr_nonkdim"),
    "cache_modifier_range": _axis("cache_modifier"),
    "overwrite": _AiterFlag(note="each run has a folder of its own", is_switch=True),
    "n_list": _OF_FILES,
    "k_list": _OF_FILES,
    "json_prefix": _OF_FILES,
    "last_m_any": _AiterFlag(note=_FILES_NOTE, is_switch=True),
    "max_m": _OF_FILES,
    "list": _AiterFlag(note=_NO_EQUIVALENT, is_switch=True),
    "repo_dir": _AiterFlag(note=_NO_EQUIVALENT),
}
"""By the flag without dashes, in lower case."""
_SINGLE_DASH = ("i", "o", "o2", "k", "v", "s", "n", "b", "g")
"""Flags with one dash."""
_SIZE_FLAGS = ("--M", "--N", "--K", "--BATCH")
"""Sizes by their upper case: `--batch` is another flag."""
_PIPELINES = ("verify", "compare")


def _is_flag(argument: str, rest: Sequence[str], own: Collection[str]) -> bool:
    """True if an argument is a flag of aiter's scripts; `-i` is one if a file follows it."""
    flag, bound, value = argument.partition("=")
    if flag == "-i":
        return _is_file(value if bound else next(iter(rest), ""))
    return flag not in own and _find_flag(flag) is not None


def _is_file(argument: str) -> bool:
    named = argument.endswith(".csv") or "/" in argument or "*" in argument
    return (
        "=" not in argument
        and not argument.startswith("-")
        and (named or (bool(argument) and Path(argument).is_file()))
    )


def _find_flag(flag: str) -> _AiterFlag | None:
    if flag in _SIZE_FLAGS:
        return _SIZES
    name = flag.lstrip("-").replace("-", "_").lower()
    return _AITER_FLAGS.get(name) if flag.startswith("--") != (name in _SINGLE_DASH) else None


@dataclass(kw_only=True)
class _Found:
    """The flags and keys of aiter in a command line, and the equivalents of all of them."""

    typed: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    """`flag`, `key`."""
    translated: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Whole messages: libtypes of `backend=`, files joined by colons."""

    def add(self, word: str, kind: str, text: str, known: _AiterFlag, values: Sequence[str], *, alone: bool) -> None:
        """Adds a flag or a key; `word` is its name for a note, `alone` if no other argument was typed."""
        self.typed.append(text)
        self.kinds.add(kind)
        self.translated += known.translate(values)
        if known.note:
            self.notes.append(known.note if alone else f"{word}: {known.note}")

    def refuse(self) -> None:
        """Raises UserError if there are any: one line with the equivalent of all."""
        parts = []
        if self.typed:
            kinds = " and ".join(f"{kind}s" for kind in sorted(self.kinds))
            what = f"aiter {kinds}" if len(self.typed) > 1 else f"an aiter {next(iter(self.kinds))}"
            expected = [f"expected {_command(self.translated)}"] if self.translated else []
            parts = [f"{' '.join(self.typed)}: {what}", *expected, *self.notes, *_unsupported_notes(self.typed)]
        if parts or self.others:
            raise UserError("; ".join([*parts, *self.others]))


def check_flags(argv: Sequence[str], own: Collection[str]) -> None:
    """Raises UserError for aiter flags, with the equivalents of all of them in one line; `own`: gemmpipe's flags."""
    found = _Found()
    plain: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-") or not _is_flag(argument, rest, own):
            plain.append(argument)
            continue
        flag, bound, value = argument.partition("=")
        known = _find_flag(flag)
        assert known is not None
        values = [value] if bound else _flag_values(known, rest)
        text = " ".join([argument, *([] if bound else values)])
        alone = len(argv) == (1 if bound else 1 + len(values))
        found.add(flag, "flag", text, known, values, alone=alone)
    if found.typed:
        _add_overrides(found, plain, ConfigFolders(config_dir=None).options)
        found.refuse()


def _flag_values(known: _AiterFlag, rest: list[str]) -> list[str]:
    """The values of a flag, removed from the arguments that follow it."""
    values: list[str] = []
    while rest and not rest[0].startswith("-") and (known.takes_many or not values):
        if "=" in rest[0] or (known.is_switch and rest[0] not in ("True", "False", "true", "false")):
            break
        values.append(rest.pop(0))
    return values


def _command(arguments: Sequence[str]) -> str:
    """The arguments quoted for a shell; with a pipeline, as a whole command."""
    ordered = sorted(dict.fromkeys(arguments), key=lambda argument: argument not in _PIPELINES)
    command = ["gemmpipe"] if ordered[0] in _PIPELINES else []
    return shell_join([*command, *ordered])


def _unsupported_notes(typed: Sequence[str]) -> list[str]:
    named = [name for name in _UNSUPPORTED if any(name in re.split(r"[,\s=\[\]]", each) for each in typed)]
    return [f"no backend runs {name}" for name in named]


def check_aiter_overrides(arguments: Sequence[str], options: Mapping[str, Sequence[str]]) -> None:
    """Raises UserError for each `key=value` of aiter's scripts: their keys, libtypes, files joined by colons."""
    found = _Found()
    _add_overrides(found, arguments, options)
    found.refuse()


def _add_overrides(found: _Found, arguments: Sequence[str], options: Mapping[str, Sequence[str]]) -> None:
    keys = [argument for argument in arguments if _key_flag(argument, options) is not None]
    for argument in dict.fromkeys(arguments):
        key, bound, value = argument.partition("=")
        known = _key_flag(argument, options)
        if known is not None:
            found.add(key, "key", argument, known, [value] if value else [], alone=len(keys) == 1 and not found.typed)
        elif bound and key == "backend":
            found.others += _backend_messages(value, options["backend"])
        elif key in ("inputs", "shapes.path") and ":" in value and not Path(value).exists():
            files = [part for part in value.strip("[]").split(":") if part]
            if len(files) > 1 and all(part.endswith(".csv") for part in files):
                listed = shell_quote(f"{key}=[{','.join(files)}]")
                found.others.append(f"{key}: several files are a list: {listed}")


def _key_flag(argument: str, options: Mapping[str, Sequence[str]]) -> _AiterFlag | None:
    """The flag of aiter with the name of an override's key; None for a key of gemmpipe."""
    key, bound, _ = argument.partition("=")
    if not bound or key.startswith("-") or len(key) < 2 or key.split(".")[0].split("@")[0] in {*options, *ROOT}:
        return None
    return _find_flag(f"--{key}")


def _backend_messages(value: str, known: Sequence[str]) -> list[str]:
    names = [name.strip("\"' ") for name in value.strip("[]").split(",")]
    libtype = next((name for name in names if name not in known and name in (*_BACKENDS, *_UNSUPPORTED, "all")), None)
    if libtype is None:
        return []
    if libtype in _UNSUPPORTED:
        return [f"backend: no option '{libtype}'; no backend runs {libtype}"]
    listed = shell_quote(f"backend=[{','.join(_backends_of(names))}]")
    hint = "leave backend= out for the default ones; with AMD's, expected" if libtype == "all" else "expected"
    return [f"backend: no option '{libtype}'; {hint} {listed}"]
