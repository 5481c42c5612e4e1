"""Every family through its run-time function, untuned, against its reference."""

from pathlib import Path

import pytest
import torch

import gemmpipe.runtime
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import PACKAGE
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").glob("*/__init__.py")), ids=lambda path: path.parent.name)
def test_its_function_computes_it(path: Path) -> None:
    family = load_family(path.parent.name)
    assert family.entry_point in gemmpipe.runtime.__all__, f"add {family.entry_point} to runtime/entry_points.py"
    sizes = {"B": 2, "M": 32, "N": 128, "K": 256}
    sizes |= {"token": 32, "model_dim": 128, "inter_dim": 64, "expert": 8, "topk": 2}
    values = {column.name: sizes[column.name] for column in family.key_columns if column.name in sizes}
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    try:
        problem = make_problem(family, values, defaults, "sm_90", "case")
    except UserError:
        pytest.skip("no plain product")
    spec = family.spec(problem)
    generator = torch.Generator().manual_seed(2)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    scales = tuple(scale for scale in (inputs.x_scale, weights.w_scale) if scale is not None)
    if spec.experts is not None:
        scales = (weights.w2, inputs.topk_weights, inputs.topk_ids)
    call = getattr(gemmpipe.runtime, family.entry_point)
    out = call(inputs.x, weights.w, *scales)
    assert error_ratio(out, family.reference(spec, inputs, weights), *family.tolerance(spec)) < 0.01
    if spec.w_layout != "nk":
        assert torch.equal(call(inputs.x, weights.w.view(spec.n // 16, spec.k * 16), *scales), out)
    if spec.batch == 1:
        shaped = call(inputs.x.view(4, 8, -1), weights.w, *scales)
        assert torch.equal(shaped.view(32, -1), out)
    with torch.no_grad():
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        assert torch.equal(compiled(inputs.x, weights.w, *scales), out)
