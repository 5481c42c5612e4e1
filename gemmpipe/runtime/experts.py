"""A mixture of experts at run time: the tuned candidate found once a key, bound in each call."""

from collections.abc import Callable

import torch

from gemmpipe.data import Device
from gemmpipe.errors import UserError
from gemmpipe.family import GemmSpec, Implementation, Prepared, load_family
from gemmpipe.launching.workspace import fresh_scratch
from gemmpipe.runtime.answering import CallKey, FirstCall, device_of
from gemmpipe.runtime.calls import MakeOut, NotInGraph, kept_form, on
from gemmpipe.runtime.choosing import Chosen
from gemmpipe.runtime.dispatch import Dispatch
from gemmpipe.runtime.dispatches import EAGER, Recorded, dispatch_of
from gemmpipe.runtime.operands import no_tensor
from gemmpipe.runtime.routed import OPTIONAL, Routed, experts_of, problem_of, routed_inputs, routed_weights
from gemmpipe.runtime.selecting import Selected
from gemmpipe.runtime.selection import Untuned
from gemmpipe.runtime.watching import layer, quiet

RoutedCall = Callable[[Routed], torch.Tensor]


def mixture(family: str, given: Routed, *, borrowed: bool = False) -> torch.Tensor:
    """What the experts give, [..., N] in x's type.

    Raises UserError for operands that are no mixture of this family, and where gradients are recorded.
    """
    key = checked_key(family, given)
    dispatch = None if borrowed else EAGER.get(family)
    dispatch = dispatch or dispatch_of(family, borrowed=borrowed)
    if isinstance(dispatch, Recorded):
        return recorded(dispatch, dispatch, key, given)
    return mixed(dispatch, key, given)


def checked_key(family: str, given: Routed) -> CallKey:
    """What a bound call takes for granted. Raises UserError for what is no tensor, and where gradients are recorded."""
    try:
        key = given.key
    except AttributeError:
        raise no_tensor(load_family(family).entry_point, given.tensors, optional=OPTIONAL) from None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given.tensors.values()):
        raise UserError("fused experts record no gradients: call them under torch.no_grad()")
    return key


def mixed(dispatch: Dispatch, key: CallKey, given: Routed) -> torch.Tensor:
    """The mixture by this dispatch."""
    call = dispatch.calls.get(key)
    try:
        return _first(dispatch, key, given) if call is None else call(given)
    except NotInGraph:
        return _in_graph(dispatch, given)


def recorded(counting: Recorded, dispatch: Dispatch, key: CallKey, given: Routed) -> torch.Tensor:
    """The mixture by `dispatch`, counted as one, whatever products of torch's it is computed by."""
    with quiet():
        out = mixed(dispatch, key, given)
    if out.numel():
        family = dispatch.family
        counting.recorder.add(family.name, {**dict(problem_of(family, given).key), "op": family.entry_point}, layer())
    return out


def _first(dispatch: Dispatch, key: CallKey, given: Routed) -> torch.Tensor:
    """Check, then the key's call, or the first selected candidate that runs, kept. Raises NotInGraph."""
    problem = problem_of(dispatch.family, given)
    spec = experts_of(dispatch.family, given, problem)
    if given.x.is_meta or not spec.m:  # no memory, or nothing to write there
        return given.x.new_empty((*given.x.shape[:-1], spec.n))
    device = device_of(given.x.get_device())

    def bind(selected: Selected) -> RoutedCall | None:
        if selected.chosen.rows is not None:  # rows of padding would be routed too
            return None
        return _bound(selected.chosen, spec, device, borrowed=dispatch.borrowed, make_out=dispatch.make_out)

    asked = FirstCall(
        problem=problem, spec=spec, device=device, bind=bind, run=lambda call: call(given), counted=_counted
    )
    return dispatch.first(key, asked)


def _in_graph(dispatch: Dispatch, given: Routed) -> torch.Tensor:
    """The fallback, inside a graph whose weights were not prepared before: nothing that it makes is kept."""
    problem, device = problem_of(dispatch.family, given), device_of(given.x.get_device())
    spec, chosen = dispatch.in_graph(problem, device, "")
    return _bound(chosen, spec, device, keep=False)(given)


def _counted(call: RoutedCall, untuned: Untuned) -> RoutedCall:
    def counted(given: Routed) -> torch.Tensor:
        untuned.calls += 1
        return call(given)

    return counted


def _bound(
    chosen: Chosen,
    spec: GemmSpec,
    device: Device,
    *,
    keep: bool = True,
    borrowed: bool = False,
    make_out: MakeOut | None = None,
) -> RoutedCall:
    """Without `keep` weights are prepared in each call, whose graph then has what was made."""
    implementation, knobs = chosen.implementation, chosen.candidate.knobs
    plain = type(implementation).prepare is Implementation.prepare

    def call(given: Routed) -> torch.Tensor:
        with on(device):
            inputs, weights = routed_inputs(given, spec), routed_weights(given)
            prepared = Prepared(weights=weights)
            if not plain and keep:
                prepared = kept_form(chosen, spec, weights, device, borrowed=borrowed)
            elif not plain:
                prepared = implementation.prepare(spec, weights, knobs)
            shape = (spec.m, spec.n)
            if make_out is None:
                out = torch.empty(shape, dtype=given.x.dtype, device=given.x.device)
            else:
                out = make_out().view(shape)
            with fresh_scratch():
                launch = implementation.bind(spec, knobs, device, inputs, prepared, out)
            out = launch()  # a library may return memory of its own
        return out.view(*given.x.shape[:-1], spec.n)

    return call
