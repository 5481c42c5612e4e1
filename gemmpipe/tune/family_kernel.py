"""Tuning of a shipped family's own kernel through its run-time function, for scripts without a `tune` function."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gemmpipe.core.errors import UserError, short_repr
from gemmpipe.family import Family, GemmSpec, Inputs, KernelDefaults, Weights, load_family, shipped_families
from gemmpipe.tune.kernel import Config, tune_kernel
from gemmpipe.tune.measuring import Mismatch

if TYPE_CHECKING:
    import torch

_MAX_ERROR_RATIO = 0.05  # share of elements outside the family's tolerance; a result from there on is wrong
_MAX_TOLERANCES = 8  # largest error of a correct element, in tolerances (gemmpipe.family.reference)
_SEED = 1


def family_of_tag(tag: str) -> Family:
    """The family with this tag in the names of its Triton JSON files. Raises UserError if there is none."""
    tags = {family.json_tag: family for family in map(load_family, shipped_families()) if not _routed(family)}
    word = _normalised(tag) if isinstance(tag, str) else ""
    matching = [known for known in tags if re.match(rf"{_normalised(known)}(-|$)", word)]
    if not matching:
        raise UserError(
            f"tag: {short_repr(tag)} does not begin with a family's tag, expected one of {', '.join(sorted(tags))}, "
            "or tune= with a function (M, N, K, dtype, search_space) -> configuration"
        )
    return tags[max(matching, key=len)]


def _normalised(tag: str) -> str:
    return tag.upper().replace("_", "-")


def _routed(family: Family) -> bool:
    return family.rows_column != "M"


def tune_family_kernel(
    tag: str, m: int, n: int, k: int, dtype: Any, search_space: Sequence[Mapping[str, Any]]
) -> Config:
    """The best configuration of the family's kernel for one product [m, k] x [n, k]^T, on the current device.

    `tag` names the family, and the batch if it has one (`BATCHED_A16W16-B=16-N=512-K=128`). `dtype` is the operands'
    type, or for operands of 8 or 4 bits the result's (torch's dtype or its name). Each result is compared with the
    family's reference. Raises as `tune_kernel`; UserError for sizes or a dtype that the family does not compute.
    """
    family = family_of_tag(tag)
    sizes = {"M": m, "N": n, "K": k, **{name: int(size) for name, size in re.findall(r"-(B)=(\d+)", tag)}}
    spec = _spec(family, sizes, dtype)
    weights, inputs = _operands(family, spec)
    reference = family.reference(spec, inputs, weights)
    atol_share, rtol = family.tolerance(spec)

    def make(config: Config) -> "tuple[Callable[[], torch.Tensor], torch.Tensor]":
        import torch

        from gemmpipe.family.reference import error_ratio

        out = torch.empty(spec.out_shape, dtype=getattr(torch, spec.out_dtype), device=inputs.x.device)
        run = _run(family, inputs, weights, out, config)
        wrong = error_ratio(run(), reference, atol_share, rtol)
        if wrong >= _MAX_ERROR_RATIO:
            raise Mismatch(f"{wrong:.1%} of the result is wrong")
        return run, reference.to(out.dtype)

    largest = float(reference.square().mean(dim=-1).sqrt().max())
    return tune_kernel(search_space, make, atol=_MAX_TOLERANCES * atol_share * largest, rtol=_MAX_TOLERANCES * rtol)


def _spec(family: Family, sizes: Mapping[str, int], dtype: Any) -> GemmSpec:
    from gemmpipe import get_arch
    from gemmpipe.family.problem import make_problem

    word = None if dtype is None else str(dtype).removeprefix("torch.")
    arch = get_arch()
    try:
        defaults = KernelDefaults(dtype=word, out_dtype=None, bias=None)
        return family.spec(make_problem(family, sizes, defaults, arch, "tag"))
    except UserError:
        defaults = KernelDefaults(dtype=None, out_dtype=word, bias=None)
        return family.spec(make_problem(family, sizes, defaults, arch, "tag"))


def _operands(family: Family, spec: GemmSpec) -> tuple[Weights, Inputs]:
    import torch

    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(_SEED)
    return family.make_weights(spec, generator), family.make_inputs(spec, generator)


def _run(
    family: Family, inputs: Inputs, weights: Weights, out: "torch.Tensor", config: Config
) -> "Callable[[], torch.Tensor]":
    """The timed call: the family's run-time function as engines call it, with given knobs and output."""
    import torch

    from gemmpipe import runtime

    function: Callable[..., torch.Tensor] = getattr(runtime, family.entry_point)
    operands = [inputs.x, weights.w]
    if inputs.x_scale is not None and weights.w_scale is not None:
        operands += [inputs.x_scale, weights.w_scale]

    def run() -> torch.Tensor:
        with torch.inference_mode():
            return function(*operands, y=out, config=config)

    return run
