"""Which candidate the knobs of a call's `config=` are, and the dispatch that runs it and nothing else."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gemmpipe.asking import in_words
from gemmpipe.data import Candidate, Device, Problem, Scalar
from gemmpipe.errors import GemmpipeError, UserError, closest, nearest, shown
from gemmpipe.family import Family, GemmSpec, Implementation, load_family
from gemmpipe.runtime.answering import CallKey, FirstCall
from gemmpipe.runtime.calls import MakeOut
from gemmpipe.runtime.choosing import Chosen, implementation_of
from gemmpipe.runtime.dispatch import Dispatch
from gemmpipe.runtime.dispatches import OTHERS, dispatch_of
from gemmpipe.runtime.selecting import Selected
from gemmpipe.templates.axes import KIND
from gemmpipe.templates.warp_specialised import WARP_SPECIALISED

BACKEND = "backend"
"""The key of a configuration that says whose knobs the others are."""
_BY_KIND = {"plain": "triton", WARP_SPECIALISED: "gluon"}
_MOST = 256  # configurations whose calls are kept: a tuning script comes with thousands, each for a few launches
_LOCK = threading.Lock()

Config = Mapping[str, Scalar]


class DoesNotFit(UserError):
    """A configuration that is one, and cannot run on this product or device: a tuner passes over it."""


@dataclass(frozen=True, kw_only=True)
class Configured(Dispatch):
    """Runs one configuration as it is given; tables are not asked, and nothing takes its place where it fails."""

    config: tuple[tuple[str, Scalar], ...]

    def first(self, key: CallKey, asked: FirstCall) -> torch.Tensor:
        """The first call of a key: the configuration is checked, bound and run. Raises UserError, DoesNotFit."""
        with self.lock:
            call = self.calls.get(key)
            if call is None:
                chosen = chosen_by(self.family, dict(self.config), asked.spec, asked.device)
                call = asked.bind(Selected(step="given", source="config", chosen=chosen))
                if call is None:
                    raise GemmpipeError(f"{self.family.entry_point}: config: cannot be bound")
                out = asked.run(call)
                self.calls[key] = call
                return out
        return asked.run(call)

    def in_graph(self, problem: Problem, device: Device, otherwise: str) -> tuple[GemmSpec, Chosen]:
        """The same candidate, which prepares the weights inside the graph."""
        spec = self.family.spec(problem)
        return spec, chosen_by(self.family, dict(self.config), spec, device)


def chosen_by(family: Family, config: Config, spec: GemmSpec, device: Device) -> Chosen:
    """The candidate that a configuration describes. Raises UserError for a wrong knob, DoesNotFit."""
    where = f"{family.entry_point}: config"
    knobs = dict(config)
    implementation = _implementation(family, knobs, where)
    if reason := implementation.unavailable(device):
        raise DoesNotFit(f"{where}: {implementation.label}: {reason}")
    known = implementation.knob_names(spec, device)
    for name in knobs:
        if known is not None and name not in known:
            raise UserError(f"{where}: {implementation.label} has no knob '{name}'{nearest(name, known)}")
    try:
        normalised = implementation.normalise(spec, knobs, device)
        reason = implementation.misfit(spec, normalised, device)
    except KeyError as missing:
        raise UserError(f"{where}: {implementation.label} needs {missing.args[0]}, which is not given") from None
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix('space.')}") from None
    except Exception as error:  # noqa: BLE001 - nobody checked these knobs, and the code may be the user's
        raise UserError(f"{where}: {in_words(implementation, error)}") from None
    if reason:
        raise DoesNotFit(f"{where}: {reason}")
    return Chosen(implementation=implementation, candidate=Candidate.of(implementation.label, normalised))


def _implementation(family: Family, knobs: dict[str, Scalar], where: str) -> Implementation:
    """Whose knobs they are: `backend`, which is taken out, else what `kernel_type` says, else the family's first."""
    own = [each.label for each in family.implementations]
    named, kind = knobs.pop(BACKEND, None), knobs.get(KIND)
    word, value = (KIND, kind) if named is None else (BACKEND, named)
    label = own[0] if value is None else str(value)
    found = implementation_of(family, _BY_KIND.get(label, label) if word == KIND else label)
    if found is None:
        raise UserError(f"{where}: {word}: {value!r}, expected one of {', '.join(own)}{closest(label, own)}")
    return found


def frozen(config: object, name: str) -> tuple[tuple[str, Scalar], ...]:
    """A configuration as a key. Raises UserError for what is no mapping of knobs to single values."""
    if not isinstance(config, Mapping):
        raise UserError(f"{name}: config: {shown(config)}, expected knobs such as {{'BLOCK_SIZE_M': 64}}")
    for knob, value in config.items():
        if not isinstance(knob, str) or not (value is None or isinstance(value, str | int | float)):
            raise UserError(f"{name}: config: {knob}: {shown(value)}, expected a number, a text, True, False or None")
    return tuple(config.items())


def configured_of(family: str, config: tuple[tuple[str, Scalar], ...], make_out: MakeOut | None) -> Configured:
    """The process's dispatch of one configuration, made when first asked for; the oldest ones are forgotten."""
    key = (family, config, make_out)
    found = OTHERS.get(key)
    if found is None:
        made = Configured(family=load_family(family), borrowed=False, make_out=make_out, config=config)
        with _LOCK:
            while len(OTHERS) >= _MOST:
                del OTHERS[next(iter(OTHERS))]
            found = OTHERS.setdefault(key, made)
    assert isinstance(found, Configured)
    return found


def writing_of(family: str, make_out: MakeOut) -> Dispatch:
    """The process's dispatch of tuned calls into a given output; it shares the tables of the plain one."""
    key = (family, make_out)
    found = OTHERS.get(key)
    if found is None:
        plain = dispatch_of(family)
        plain.tables()
        made = Dispatch(family=plain.family, borrowed=False, make_out=make_out, _tables=plain._tables)
        with _LOCK:
            found = OTHERS.setdefault(key, made)
    return found


def configured_dispatch(family: str, config: str) -> Configured:
    """The dispatch of a configuration as JSON, for compiled graphs, whose pool holds what it makes."""
    key = (family, config)
    found = OTHERS.get(key)
    if found is None:
        made = Configured(family=load_family(family), borrowed=True, config=tuple(json.loads(config).items()))
        with _LOCK:
            found = OTHERS.setdefault(key, made)
    assert isinstance(found, Configured)
    return found
