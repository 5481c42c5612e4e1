"""The candidate of a call's `config=`, and the dispatch that runs only this one."""

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from gemmpipe.core.data import Candidate, Device, Problem, Scalar
from gemmpipe.core.errors import GemmpipeError, UserError, short_repr, suggest, suggest_or_list
from gemmpipe.family import Family, GemmSpec, Implementation, load_family
from gemmpipe.family.guard import describe_error
from gemmpipe.runtime.binding import MakeOut
from gemmpipe.runtime.cache import BindRequest, CallKey
from gemmpipe.runtime.dispatch import WITH_OPTIONS, Dispatch, dispatch_of
from gemmpipe.runtime.select import LookupResult, RunnableCandidate, find_implementation
from gemmpipe.templates.params import KERNEL_TYPE, LABEL_BY_KERNEL_TYPE, kernel_types

BACKEND_KEY = "backend"
"""The key of a configuration that names the backend of its knobs."""
_MAX_DISPATCHES = 256
"""Configurations with kept calls: a tuning script has thousands of them, each for a few launches."""
_LOCK = threading.Lock()

Config = Mapping[str, Scalar]


class DoesNotFit(UserError):
    """A valid configuration that cannot run on this product or device: a tuner skips it."""


@dataclass(frozen=True, kw_only=True)
class FixedConfigDispatch(Dispatch):
    """Runs one given configuration, without tables and without a fallback."""

    config: tuple[tuple[str, Scalar], ...]

    def first_call(self, key: CallKey, request: BindRequest) -> torch.Tensor:
        """Check, bind and run the configuration, and keep the call. Raises UserError, DoesNotFit."""
        with self.lock:
            call = self.calls.get(key)
            if call is None:
                runnable = candidate_from_config(self.family, dict(self.config), request.spec, request.device)
                call = request.bind(LookupResult(step="given", source="config", runnable=runnable))
                if call is None:
                    raise GemmpipeError(f"{self.family.entry_point}: config: cannot be bound")
                out = request.run(call)
                self.calls[key] = call
                return out
        return request.run(call)

    def check_without_rows(self, spec: GemmSpec, device: Device) -> None:
        """Raises UserError for wrong knobs, as for one row."""
        if min(spec.n, spec.k):
            with suppress(DoesNotFit):  # another number of rows may fit
                candidate_from_config(self.family, dict(self.config), replace(spec, m=1), device)

    def select_for_graph(
        self, problem: Problem, device: Device, alternative: str
    ) -> tuple[GemmSpec, RunnableCandidate]:
        """The same candidate; it prepares the weights inside the graph."""
        spec = self.family.spec(problem)
        return spec, candidate_from_config(self.family, dict(self.config), spec, device)


def candidate_from_config(family: Family, config: Config, spec: GemmSpec, device: Device) -> RunnableCandidate:
    """The candidate that a configuration describes. Raises UserError for a wrong knob, DoesNotFit."""
    where = f"{family.entry_point}: config"
    knobs = dict(config)
    implementation = _implementation(family, knobs, where)
    if reason := implementation.unavailable(device):
        raise DoesNotFit(f"{where}: {implementation.label}: {reason}")
    known = implementation.knob_names(spec, device)
    for name in knobs:
        if known is not None and name not in known:
            raise UserError(f"{where}: {implementation.label} has no knob '{name}'{suggest_or_list(name, known)}")
    try:
        normalised = implementation.normalise(spec, knobs, device)
        reason = implementation.unsupported_reason(spec, normalised, device)
    except KeyError as missing:
        raise UserError(f"{where}: {implementation.label} needs {missing.args[0]}, which is not given") from None
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix('space.')}") from None
    except Exception as error:  # noqa: BLE001 - these knobs are unchecked, and the code may be the user's
        raise UserError(f"{where}: {describe_error(implementation, error)}") from None
    if reason:
        raise DoesNotFit(f"{where}: {reason}")
    return RunnableCandidate(implementation=implementation, candidate=Candidate.of(implementation.label, normalised))


def _implementation(family: Family, knobs: dict[str, Scalar], where: str) -> Implementation:
    """The implementation of the knobs: `backend` (removed from them), else `kernel_type`'s, else the family's first."""
    own = [each.label for each in family.implementations]
    named, kind = knobs.pop(BACKEND_KEY, None), knobs.get(KERNEL_TYPE)
    option, value = (KERNEL_TYPE, kind) if named is None else (BACKEND_KEY, named)
    label = own[0] if value is None else str(value)
    by_type = option == KERNEL_TYPE and value is not None
    found = find_implementation(family, LABEL_BY_KERNEL_TYPE.get(label, label) if by_type else label)
    if found is None:
        known = kernel_types(own) if by_type else own
        raise UserError(f"{where}: {option}: {value!r}, expected one of {', '.join(known)}{suggest(label, known)}")
    return found


def frozen_config(config: object, name: str) -> tuple[tuple[str, Scalar], ...]:
    """A configuration as a key. Raises UserError for anything but a mapping of knobs to single values."""
    if not isinstance(config, Mapping):
        raise UserError(f"{name}: config: {short_repr(config)}, expected knobs such as {{'BLOCK_SIZE_M': 64}}")
    for knob, value in config.items():
        if not isinstance(knob, str) or not (value is None or isinstance(value, str | int | float)):
            raise UserError(
                f"{name}: config: {knob}: {short_repr(value)}, expected a number, a text, True, False or None"
            )
    return tuple(config.items())


def fixed_config_dispatch(
    family: str, config: tuple[tuple[str, Scalar], ...], make_out: MakeOut | None
) -> FixedConfigDispatch:
    """The process's dispatch of one configuration, made at the first use; the oldest ones are dropped."""
    key = (family, config, make_out)
    found = WITH_OPTIONS.get(key)
    if found is None:
        made = FixedConfigDispatch(family=load_family(family), graph_pool=False, make_out=make_out, config=config)
        with _LOCK:
            while len(WITH_OPTIONS) >= _MAX_DISPATCHES:
                del WITH_OPTIONS[next(iter(WITH_OPTIONS))]
            found = WITH_OPTIONS.setdefault(key, made)
    assert isinstance(found, FixedConfigDispatch)
    return found


def output_dispatch(family: str, make_out: MakeOut) -> Dispatch:
    """The process's dispatch of tuned calls into a given output; it shares the tables of the plain one."""
    key = (family, make_out)
    found = WITH_OPTIONS.get(key)
    if found is None:
        plain = dispatch_of(family)
        plain.tables()
        made = Dispatch(family=plain.family, graph_pool=False, make_out=make_out, _tables=plain._tables)
        with _LOCK:
            found = WITH_OPTIONS.setdefault(key, made)
    return found


def graph_config_dispatch(family: str, config: str) -> FixedConfigDispatch:
    """The dispatch of a configuration as JSON, for compiled graphs; memory that it makes belongs to their pool."""
    key = (family, config)
    found = WITH_OPTIONS.get(key)
    if found is None:
        made = FixedConfigDispatch(
            family=load_family(family), graph_pool=True, config=tuple(json.loads(config).items())
        )
        with _LOCK:
            found = WITH_OPTIONS.setdefault(key, made)
    assert isinstance(found, FixedConfigDispatch)
    return found
