"""Every plain family's function in all circumstances of engines: any layout and address, empty operands."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from pairwise import few

import gemmpipe.runtime
from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import PACKAGE
from gemmpipe.family import Family, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem

M, N, K = 16, 256, 256


@dataclass
class Case:
    """The operands of a product and their result."""

    call: Callable[..., torch.Tensor]
    operands: tuple[torch.Tensor, ...]
    batched: bool

    @property
    def out(self) -> torch.Tensor:
        """The product of the operands as they are."""
        return self.call(*self.operands)


def plain_families() -> list[str]:
    names = sorted(path.parent.name for path in (PACKAGE / "kernels").glob("*/__init__.py"))
    return [name for name in names if {"M", "N", "K"} <= {column.name for column in load_family(name).key_columns}]


@pytest.fixture(params=plain_families())
def case(request: pytest.FixtureRequest) -> Case:
    family: Family = load_family(request.param)
    names = {column.name for column in family.key_columns}
    values = {name: size for name, size in {"B": 2, "M": M, "N": N, "K": K}.items() if name in names}
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, values, defaults, "sm_90", "case"))
    generator = torch.Generator().manual_seed(2)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    scales = tuple(scale for scale in (inputs.x_scale, weights.w_scale) if scale is not None)
    call = getattr(gemmpipe.runtime, family.entry_point)
    return Case(call=call, operands=(inputs.x, weights.w, *scales), batched=spec.batch > 1)


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between rows, at an odd address."""
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    wide = torch.zeros(*raw.shape[:-1], raw.shape[-1] + 3, dtype=raw.dtype)
    wide[..., 1:-2] = raw
    return wide[..., 1:-2].view(tensor.dtype) if raw is not tensor else wide[..., 1:-2]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=1e-2 * float(expected.float().std()), rtol=1e-2)


def test_operands_with_any_layout(case: Case) -> None:
    expected = case.out
    for place, tensor in enumerate(case.operands):
        if tensor.numel() == 1:
            continue
        moved = [*case.operands]
        moved[place] = elsewhere(tensor)
        assert not moved[place].is_contiguous()
        same(case.call(*moved), expected)


def test_under_inference_mode_and_with_inference_tensors(case: Case) -> None:
    expected = case.out
    with torch.inference_mode():
        same(case.out, expected)
        same(case.call(*(tensor.clone() for tensor in case.operands)), expected)


def test_under_autocast_to_another_type(case: Case) -> None:
    expected = case.out
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        found = case.out
    wide = not expected.dtype.is_floating_point or len(case.operands) == 4
    assert found.dtype == (expected.dtype if wide else torch.float16)
    torch.testing.assert_close(found.float(), expected.float(), atol=0.05 * float(expected.float().std()), rtol=0.05)


@pytest.mark.compile
def test_the_default_output_type(case: Case) -> None:
    found = case.call(*case.operands, out_dtype=None)
    assert torch.equal(found, case.out)
    assert found.dtype == case.out.dtype == torch.bfloat16
    torch.compiler.reset()
    compiled = torch.compile(lambda: case.call(*case.operands, out_dtype=None), fullgraph=True, backend="eager")
    assert compiled().dtype == torch.bfloat16


def without_rows(case: Case) -> tuple[torch.Tensor, ...]:
    """The operands of an empty batch."""
    rows = (0, 2) if len(case.operands) == 4 else (0,)
    return tuple(
        tensor if place not in rows or tensor.numel() == 1 else tensor[:, :0] if case.batched else tensor[:0]
        for place, tensor in enumerate(case.operands)
    )


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_no_rows(case: Case, place: str) -> None:
    found = case.call(*(tensor.to(place) for tensor in without_rows(case)))
    assert found.shape == ((2, 0, N) if case.batched else (0, N))
    assert found.device.type == place
    assert found.dtype == case.out.dtype


def test_no_columns_and_no_inner_elements(case: Case) -> None:
    x, w, *scales = case.operands
    by_columns = [scale[:, :, :0] if case.batched else scale[:0] for scale in scales[-1:] if scale.numel() > 1]
    columns = case.call(x, w[..., :0, :], *scales[:-1], *(by_columns or scales[-1:]))
    assert columns.shape == (*x.shape[:-1], 0)
    blocks = bool(scales) and not case.batched and scales[-1].shape[-1] > 1
    found = case.call(x[..., :0], w[..., :0], *(scale[..., :0] if blocks else scale for scale in scales))
    assert found.shape == case.out.shape
    assert not found.any()


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_without_rows_the_rest_is_still_checked(case: Case, place: str) -> None:
    """Errors are reported at the first call, also if it has no rows."""
    x, w, *scales = (tensor.to(place) for tensor in without_rows(case))
    wrong = [
        (x[..., : x.shape[-1] // 2], w, *scales),
        (x, w[..., : w.shape[-1] // 2], *scales),
        (x.double(), w, *scales) if x.dtype != torch.float4_e2m1fn_x2 else (x, w[:, :-1], *scales),
        (torch.empty_like(x, device="meta" if place == "cpu" else "cpu"), w, *scales),
        *([(x, w, *scales[:-1], scales[-1][..., :0])] if scales else ()),
        *([(x, w, scales[0].new_empty(5, 3), scales[1])] if len(scales) == 2 else ()),
    ]
    for operands in wrong:
        with pytest.raises(UserError, match=r"^[^\n]+$"):
            case.call(*operands)


def test_no_batch() -> None:
    x, scale = torch.zeros(0, 4, 64, dtype=torch.int8), torch.ones(0, 4, 1)
    found = gemmpipe.runtime.batched_gemm_a8w8(x, torch.zeros(0, 32, 64, dtype=torch.int8), scale, torch.ones(0, 1, 32))
    assert found.shape == (0, 4, 32)


@pytest.mark.compile
@pytest.mark.parametrize("case", few(plain_families(), 0, 4, 7), indirect=True)
def test_compiled_as_one_graph_for_any_number_of_rows(case: Case) -> None:
    torch.compiler.reset()
    compiled = torch.compile(case.call, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        same(compiled(*case.operands), case.out)
        x, w, *scales = case.operands
        half = slice(0, M // 2)
        shorter = [x[:, half], w] if case.batched else [x[half], w]
        if len(scales) == 2:
            one = scales[0].numel() == 1
            shorter += [scales[0] if one else scales[0][:, half] if case.batched else scales[0][half]]
        shorter += scales[-1:]
        same(compiled(*shorter), case.call(*shorter))


def test_from_several_threads_at_once(case: Case) -> None:
    expected = case.out
    gemmpipe.runtime.reload()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: case.out, range(16)):
            same(found, expected)


def test_what_is_no_product_is_one_line(case: Case) -> None:
    x, *others = case.operands
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        case.call(x[..., : x.shape[-1] // 2], *others)
