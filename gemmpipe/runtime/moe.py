"""A mixture of experts at run time: checked and selected once per key, bound in each call."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from gemmpipe.core.data import Device, Knobs, Problem, Scalar
from gemmpipe.core.errors import UserError, short_repr
from gemmpipe.family import Family, GemmSpec, Implementation, Inputs, KeyColumn, Prepared, Weights, load_family
from gemmpipe.family.dtypes import DTYPES_16BIT, FP8_DTYPES
from gemmpipe.family.moe import routing
from gemmpipe.family.problem import parse_key_value
from gemmpipe.launch.workspace import unshared_scratch
from gemmpipe.runtime.binding import MakeOut, NotCapturable, cached_form, device_context
from gemmpipe.runtime.cache import BindRequest, CallKey, device_by_index
from gemmpipe.runtime.capture.routing import routing_counter
from gemmpipe.runtime.capture.watcher import capture_paused, current_module
from gemmpipe.runtime.copy_log import log_converted
from gemmpipe.runtime.dispatch import EAGER, Dispatch, RecordingDispatch, dispatch_of
from gemmpipe.runtime.mixture_binding import OPERANDS, BoundMixture, PlannedLaunches, bind_mixture
from gemmpipe.runtime.operands import (
    KeyDiagnosis,
    OptionalTensor,
    aligned,
    as_rows,
    check_device,
    dtype_name,
    flag,
    not_a_tensor_error,
    on_meta,
    or_list,
    spec_or_error,
)
from gemmpipe.runtime.select import LookupResult, RunnableCandidate
from gemmpipe.runtime.selection_log import UntunedKey

OPTIONAL_SCALES = ("w1_scale", "w2_scale")
"""The operands that may be None."""
_ARGUMENTS = {
    "token": "rows of x",
    "model_dim": "columns of x",
    "inter_dim": "columns of w2",
    "expert": "experts of w1",
    "topk": "columns of topk_ids",
    "act_type": "activation",
    "dtype": "type of x",
    "q_dtype_a": "type of w1",
}
"""Key column -> the argument that it comes from."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedOperands:
    """The operands of one call: x [..., K], w [E, wide, K], w2 [E, N, inner], their scales, the routing [..., topk]."""

    x: torch.Tensor
    w: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    w_scale: OptionalTensor
    w2_scale: OptionalTensor
    activation: str
    weight_first: bool

    @property
    def tensors(self) -> dict[str, OptionalTensor]:
        """All tensors by the argument names of `fused_moe`."""
        return {
            "x": self.x,
            "w1": self.w,
            "w2": self.w2,
            "topk_weights": self.topk_weights,
            "topk_ids": self.topk_ids,
            "w1_scale": self.w_scale,
            "w2_scale": self.w2_scale,
        }

    @property
    def rows(self) -> int:
        """The number of rows of x."""
        return self.x.shape[:-1].numel()

    @property
    def key(self) -> tuple[object, ...]:
        """All properties that a bound call relies on."""
        tensors = self.tensors.values()
        shapes = (None if t is None else (t.shape, t.dtype, t.get_device()) for t in tensors)
        meta_flags = on_meta(*tensors) if self.x.get_device() < 0 else ()
        return (*shapes, *meta_flags, self.activation, self.weight_first)


def routed_problem(family: Family, given: RoutedOperands) -> Problem:
    """The family's key for these operands. Raises UserError for operands of the wrong rank."""
    if any(given.tensors[argument] is None for argument in ("w1", "w2", "topk_weights", "topk_ids")):
        raise not_a_tensor_error(family.entry_point, given.tensors, optional=OPTIONAL_SCALES)
    ranks = {"w1": (given.w, 3), "w2": (given.w2, 3)}
    for argument, (tensor, rank) in ranks.items():
        if tensor.dim() != rank:
            raise UserError(f"{family.entry_point}: {argument} {list(tensor.shape)}, expected {rank} dimensions")
    if given.x.dim() < 1 or given.topk_ids.dim() < 1:
        raise UserError(f"{family.entry_point}: x {list(given.x.shape)}, expected [..., K] with topk_ids [..., topk]")
    inner, weight, x = given.w2.shape[2], dtype_name(given.w.dtype), dtype_name(given.x.dtype)
    quantised = "none"
    if given.w_scale is not None:
        quantised = "per_token" if given.w_scale.numel() == given.w.shape[0] * given.w.shape[1] else "per_1x128"
    values: dict[str, Scalar] = {
        "token": given.rows or 1,  # without rows nothing is looked up, but the rest is checked
        "model_dim": given.x.shape[-1],
        "inter_dim": inner,
        "expert": given.w.shape[0],
        "topk": given.topk_ids.shape[-1],
        "act_type": given.activation,
        "dtype": x,
        "q_dtype_a": weight,
        "q_dtype_w": weight,
        "q_type": quantised,
        "use_g1u1": int(given.w.shape[1] == 2 * inner),
        "doweight_stage1": int(flag(family.entry_point, "doweight_stage1", given.weight_first)),
    }
    return family.problem(tuple((c.name, _cell(family, c, values.get(c.name))) for c in family.key_columns))


def _cell(family: Family, column: KeyColumn, value: Scalar) -> Scalar:
    try:
        if value is not None and not isinstance(value, str | int | float):
            raise UserError(f"{short_repr(value)}, expected a text")
        return parse_key_value(column, value, "")
    except UserError as error:
        raise UserError(f"{family.entry_point}: {_ARGUMENTS.get(column.name, column.name)}: {error}") from None


def routed_spec(family: Family, given: RoutedOperands, problem: Problem) -> GemmSpec:
    """The spec of these experts. Raises UserError for an operand that does not match it."""
    spec = replace(
        spec_or_error(family, problem, lambda diagnosis: _routing_error(family, given, diagnosis)), m=given.rows
    )
    check_routed(family, given, spec)
    return spec


def _routing_error(family: Family, given: RoutedOperands, diagnosis: KeyDiagnosis) -> str | None:
    x, w = dtype_name(given.x.dtype), dtype_name(given.w.dtype)
    if x not in DTYPES_16BIT:
        return f"x is {x}, expected {or_list(DTYPES_16BIT)}"
    if given.w_scale is None and w in FP8_DTYPES:
        return f"w1_scale: none, expected float32 scales for {w} weights"
    if given.w_scale is not None and w in DTYPES_16BIT:
        return f"w1_scale: given, expected none for {w} weights"
    if w != x and w not in FP8_DTYPES:
        return f"w1 is {w}, expected {x} as x, or fp8 with scales"
    (column,) = (c for c in family.key_columns if c.name == "act_type")
    computed = [name for name, value in column.choices if diagnosis.spec({"act_type": value})]
    return f"activation: {given.activation!r} is not computed, expected {or_list(computed)}" if computed else None


def check_routed(family: Family, given: RoutedOperands, spec: GemmSpec) -> None:
    """Raises UserError for an operand of the wrong shape, type or device."""
    experts, name = spec.experts, family.entry_point
    if experts is None:
        raise UserError(f"{name}: a family without experts")
    check_device(name, given.x)
    if error := _sizes_error(given):
        raise UserError(f"{name}: {error}")
    routing = [*given.x.shape[:-1], experts.topk]
    expected: dict[str, list[list[int]]] = {
        "w1": [[experts.count, experts.w1_rows, spec.k]],
        "w2": [[experts.count, spec.n, experts.inner]],
        "topk_weights": [routing, [spec.m, experts.topk]],
        "topk_ids": [routing, [spec.m, experts.topk]],
        "w1_scale": _scale_shapes(spec, experts.count, experts.w1_rows, spec.k),
        "w2_scale": _scale_shapes(spec, experts.count, spec.n, experts.inner),
    }
    for argument, tensor in given.tensors.items():
        shapes = expected.get(argument)
        if shapes is not None and (list(tensor.shape) not in shapes if tensor is not None else bool(shapes)):
            found = "none" if tensor is None else str(list(tensor.shape))
            raise UserError(f"{name}: {argument} {found}, expected {shapes[0] if shapes else 'none for these types'}")
        if tensor is not None and tensor.device != given.x.device:
            raise UserError(f"{name}: {argument} is on {tensor.device}, expected {given.x.device} as x")
        if tensor is not None and argument.endswith("_scale") and tensor.dtype != torch.float32:
            raise UserError(f"{name}: {argument} is {dtype_name(tensor.dtype)}, expected float32")
    if given.w2.dtype != given.w.dtype:
        raise UserError(f"{name}: w2 is {dtype_name(given.w2.dtype)}, expected {dtype_name(given.w.dtype)} as w1")
    if given.topk_ids.is_floating_point() or given.topk_ids.dtype == torch.bool:
        raise UserError(f"{name}: topk_ids is {dtype_name(given.topk_ids.dtype)}, expected int32")


def _sizes_error(given: RoutedOperands) -> str | None:
    """The error in the sizes of x, w1 [E, 2 * I or I, K] and w2 [E, K, I], for the one that contradicts both others.

    Where w1 and w2 contradict each other alone, both are shown. None if there is none.
    """
    x, w1, w2 = (list(each.shape) for each in (given.x, given.w, given.w2))
    experts, rows, k = w1
    if w1[2] == w2[1] != x[-1]:
        return f"x {x}, expected [..., {k}] for w1 {w1} and w2 {w2}"
    paired = rows in (w2[2], 2 * w2[2])
    if w2[1] != x[-1] == k:
        transposed = sorted(w2[1:]) == sorted((k, rows // 2))
        inner = w2[2] if paired and not transposed else rows // 2
        return f"w2 {w2}, expected {[experts, k, inner]} for x {x} and w1 {w1}"
    if k != x[-1] == w2[1]:
        wide = rows if paired else 2 * w2[2]
        return f"w1 {w1}, expected {[w2[0], wide, w2[1]]} for x {x} and w2 {w2}"
    if experts != w2[0]:
        return f"w1 {w1} and w2 {w2} disagree, expected one number of experts"
    if paired:
        return None
    return f"w1 {w1} and w2 {w2} disagree, expected w2 {[experts, k, rows // 2]} or w1 {[experts, 2 * w2[2], k]}"


def _scale_shapes(spec: GemmSpec, count: int, rows: int, columns: int) -> list[list[int]]:
    if spec.w_scale is None:
        return []
    if spec.w_scale.granularity == "row":
        return [[count, rows, 1], [count, rows]]
    return [[count, -(-rows // spec.w_scale.block[0]), -(-columns // spec.w_scale.block[1])]]


def routed_inputs(given: RoutedOperands, spec: GemmSpec) -> Inputs:
    """The activations and their routing as kernels read them."""
    return Inputs(
        x=aligned(as_rows(given.x.detach(), spec.m), "x"),
        topk_ids=_as_dtype("topk_ids", given.topk_ids.reshape(spec.m, -1), torch.int32),
        topk_weights=_as_dtype("topk_weights", given.topk_weights.detach().reshape(spec.m, -1), torch.float32),
    )


def _as_dtype(argument: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in this type, contiguous and aligned."""
    if tensor.dtype != dtype:
        log_converted(argument, tensor, dtype)
        return tensor.to(dtype, memory_format=torch.contiguous_format)
    return aligned(tensor, argument)


def routed_weights(given: RoutedOperands) -> Weights:
    """The experts' weights and scales as kernels read them."""
    named = (("w1_scale", given.w_scale), ("w2_scale", given.w2_scale))
    w_scale, w2_scale = (None if s is None else aligned(s, argument).view(*s.shape[:2], -1) for argument, s in named)
    w, w2 = aligned(given.w.detach(), "w1"), aligned(given.w2.detach(), "w2")
    return Weights(w=w, w_scale=w_scale, w2=w2, w2_scale=w2_scale)


MixtureCall = Callable[[RoutedOperands], torch.Tensor]


def mixture(family: str, given: RoutedOperands, *, graph_pool: bool = False) -> torch.Tensor:
    """The experts' output [..., N] in x's type.

    Raises UserError for operands that are not a mixture of this family, and if gradients are recorded.
    """
    key = checked_key(family, given)
    dispatch = None if graph_pool else EAGER.get(family)
    dispatch = dispatch or dispatch_of(family, graph_pool=graph_pool)
    if isinstance(dispatch, RecordingDispatch):
        return record_mixture(dispatch, dispatch, key, given)
    return run_mixture(dispatch, key, given)


def checked_key(family: str, given: RoutedOperands) -> CallKey:
    """The key of these operands. Raises UserError for values that are no tensors, and if gradients are recorded."""
    try:
        key = given.key
    except AttributeError:
        raise not_a_tensor_error(load_family(family).entry_point, given.tensors, optional=OPTIONAL_SCALES) from None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given.tensors.values()):
        raise UserError("fused experts record no gradients: call them under torch.no_grad()")
    return key


def run_mixture(dispatch: Dispatch, key: CallKey, given: RoutedOperands) -> torch.Tensor:
    """The mixture by this dispatch."""
    call = dispatch.calls.get(key)
    try:
        return _bind_and_run(dispatch, key, given) if call is None else call(given)
    except NotCapturable:
        return _run_in_graph(dispatch, given)


def record_mixture(
    counting: RecordingDispatch, dispatch: Dispatch, key: CallKey, given: RoutedOperands
) -> torch.Tensor:
    """The mixture by `dispatch`, counted as one, even if torch's products compute it."""
    with capture_paused():
        out = run_mixture(dispatch, key, given)
    if out.numel():
        family = dispatch.family
        columns = dict(routed_problem(family, given).key)
        counting.recorder.add(family.name, {**columns, "op": family.entry_point}, current_module())
        if not given.topk_ids.is_meta:
            sizes = (given.w.shape[2], given.w2.shape[2], given.w.shape[0], given.topk_ids.shape[-1])
            with counting.recorder.logging_errors():
                routing_counter(counting.recorder.path).add(given.topk_ids, sizes, current_module())
    return out


def _bind_and_run(dispatch: Dispatch, key: CallKey, given: RoutedOperands) -> torch.Tensor:
    """The first call of a key: check, look up, bind, run, and keep the call. Raises NotCapturable."""
    problem = routed_problem(dispatch.family, given)
    spec = routed_spec(dispatch.family, given, problem)
    if given.x.is_meta or not spec.m:  # no memory, or no rows
        if not given.x.is_meta:
            dispatch.check_without_rows(spec, device_by_index(given.x.get_device()))
        return given.x.new_empty((*given.x.shape[:-1], spec.n))
    device = device_by_index(given.x.get_device())

    def bind(selected: LookupResult) -> MixtureCall | None:
        if selected.runnable.rows is not None:  # padding rows would be routed too
            return None
        return _bind(selected.runnable, spec, device, graph_pool=dispatch.graph_pool, make_out=dispatch.make_out)

    request = BindRequest(
        problem=problem, spec=spec, device=device, bind=bind, run=lambda call: call(given), with_counter=_counting_call
    )
    return dispatch.first_call(key, request)


def _run_in_graph(dispatch: Dispatch, given: RoutedOperands) -> torch.Tensor:
    """The fallback, inside a graph without prepared weights; nothing that it makes is kept."""
    problem, device = routed_problem(dispatch.family, given), device_by_index(given.x.get_device())
    spec, runnable = dispatch.select_for_graph(problem, device, "")
    return _bind(runnable, spec, device, keep=False)(given)


def _counting_call(call: MixtureCall, untuned: UntunedKey) -> MixtureCall:
    def counted(given: RoutedOperands) -> torch.Tensor:
        untuned.calls += 1
        return call(given)

    return counted


def _bind(
    runnable: RunnableCandidate,
    spec: GemmSpec,
    device: Device,
    *,
    keep: bool = True,
    graph_pool: bool = False,
    make_out: MakeOut | None = None,
) -> MixtureCall:
    """A call of the candidate; without `keep` it prepares the weights in each call, inside the graph if captured."""
    implementation = runnable.implementation
    knobs = implementation.called_knobs(spec, runnable.candidate.knobs)
    plain = type(implementation).prepare is Implementation.prepare

    def call(given: RoutedOperands) -> torch.Tensor:
        with device_context(device):
            inputs, weights = routed_inputs(given, spec), routed_weights(given)
            prepared = Prepared(weights=weights)
            if not plain and keep:
                prepared = cached_form(runnable, spec, weights, device, graph_pool=graph_pool)
            elif not plain:
                prepared = implementation.prepare(spec, weights, knobs)
            shape = (spec.m, spec.n)
            if make_out is None:
                out = torch.empty(shape, dtype=given.x.dtype, device=given.x.device)
            else:
                out = make_out().view(shape)
            with unshared_scratch():
                launch = implementation.bind(spec, knobs, device, inputs, prepared, out)
            out = launch()  # a library may return memory of its own
        return out.view(*given.x.shape[:-1], spec.n)

    if not plain or not isinstance(implementation, PlannedLaunches) or not implementation.launches_alone(spec):
        return call
    return _quick_call(implementation, spec, knobs, device, call, make_out)


def _quick_call(
    implementation: PlannedLaunches,
    spec: GemmSpec,
    knobs: Knobs,
    device: Device,
    general: MixtureCall,
    make_out: MakeOut | None,
) -> MixtureCall:
    """The launches bound at the first call; `general` for operands that must be converted or copied first."""
    bound: list[BoundMixture | None] = []
    shape, others = (spec.m, spec.n), device.kind != "cpu" and torch.cuda.device_count() > 1

    def call(given: RoutedOperands) -> torch.Tensor:
        if others and torch.cuda.current_device() != device.index:
            with device_context(device):
                return call(given)
        if not bound:
            bound.append(_bound_mixture(implementation, spec, knobs, device, given))
        launch, out = bound[0], None
        if launch is not None:
            out = torch.empty(shape, dtype=given.x.dtype, device=given.x.device) if make_out is None else make_out()
            x, ids, shares = given.x, given.topk_ids, given.topk_weights
            if not launch((x, ids, shares, out, given.w, given.w_scale, given.w2, given.w2_scale)):
                out = None
        return general(given) if out is None else out.view(*given.x.shape[:-1], spec.n)

    return call


def _bound_mixture(
    implementation: PlannedLaunches, spec: GemmSpec, knobs: Knobs, device: Device, given: RoutedOperands
) -> BoundMixture | None:
    """The launches for operands of these types; None if the routing must be converted in each call."""
    if given.topk_ids.dtype != torch.int32 or given.topk_weights.dtype != torch.float32:
        return None
    with device_context(device):
        inputs, weights = routed_inputs(given, spec), routed_weights(given)
        ids, shares = routing(inputs)
        out = torch.empty((spec.m, spec.n), dtype=given.x.dtype, device=given.x.device)
        tensors = (inputs.x, ids, shares, out, weights.w, weights.w_scale, weights.w2, weights.w2_scale)
        return bind_mixture(implementation, spec, knobs, device, dict(zip(OPERANDS, tensors, strict=True)))
