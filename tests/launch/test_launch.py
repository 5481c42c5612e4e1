"""A launch rebound to other operands equals a new binding, at a fraction of the cost."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from gemmpipe.core.data import Build, Device, Knobs
from gemmpipe.core.device import arch_device
from gemmpipe.family import GemmSpec, KernelDefaults, Operands, Prepared, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.launch import launch
from gemmpipe.launch.launch import ArgumentRebinder, tensors_of
from gemmpipe.templates.params import NEUTRAL_VALUES

H200 = arch_device("sm_90")
PLAIN: Knobs = {
    **NEUTRAL_VALUES,
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "NUM_KSPLIT": 2,
    "num_warps": 4,
    "num_stages": 3,
}
HOPPER: Knobs = {**PLAIN, "kernel_type": "warp_specialised", "BLOCK_SIZE_M": 64}


class Bound:
    """A fake loaded build that records the arguments of its launches."""

    interpreted = False

    def __init__(self, build: Build, device: Device) -> None:
        self.build = build

    def launcher(
        self, grid: tuple[int, int, int], arguments: Mapping[str, object], cluster: int, *, launch_pdl: bool
    ) -> Callable[[], None]:
        assert not launch_pdl, "a product alone overlaps the previous kernel"
        BOUND.append((grid, {name: _plain(value) for name, value in arguments.items()}))
        return lambda: None


BOUND: list[tuple[tuple[int, int, int], dict[str, object]]] = []


def _plain(value: object) -> object:
    """A tensor as its address, a descriptor as its address and boxes."""
    base = getattr(value, "base", None)
    if base is not None:
        return base.data_ptr(), *(str(getattr(value, name)) for name in ("shape", "strides", "block_shape", "layout"))
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    BOUND.clear()
    monkeypatch.setattr(launch, "load_build", Bound)


def _sets(family_name: str, m: int, count: int = 3) -> tuple[GemmSpec, list[Operands]]:
    family = load_family(family_name)
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": m, "N": 256, "K": 512}, defaults, H200.gfx, "a test"))
    generator = torch.Generator().manual_seed(1)
    out = getattr(torch, spec.out_dtype)
    return spec, [
        Operands(
            inputs=family.make_inputs(spec, generator),
            prepared=Prepared(weights=family.make_weights(spec, generator)),
            out=torch.empty(spec.out_shape, dtype=out),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize(
    ("family", "label", "knobs"),
    [
        ("a8w8_blockscale", "triton", PLAIN),
        ("a8w8_blockscale", "gluon", HOPPER),
        ("a8w8", "triton", PLAIN),
        ("a16w16", "triton", {**PLAIN, "BLOCK_SIZE_K": 64}),
        ("a16w16", "gluon", {**HOPPER, "BLOCK_SIZE_K": 64}),
    ],
)
def test_rebinding_equals_binding(family: str, label: str, knobs: Knobs, m: int) -> None:
    spec, sets = _sets(family, m)
    kernel = next(i for i in load_family(family).implementations if i.label == label)
    knobs = kernel.normalise(spec, knobs, H200)
    bind = kernel.binder(spec, knobs, H200)
    assert len([bind(each) for each in sets]) == 3
    together = list(BOUND)
    for each in sets:
        kernel.bind(spec, knobs, H200, each.inputs, each.prepared, each.out)
    assert together == BOUND[3:]
    assert len({str(arguments) for _, arguments in together}) == 3


def test_operands_of_another_layout_are_not_rebound() -> None:
    _, (first, second, _) = _sets("a8w8_blockscale", 16)
    arguments = {"x": first.inputs.x, "out": first.out, "rows": 16}
    rebinder = ArgumentRebinder(arguments, first)
    found = rebinder.to(second)
    assert found is not None and found["x"] is second.inputs.x and found["rows"] == 16
    wide = torch.empty(16, 512, dtype=second.out.dtype)[:, :256]
    assert rebinder.to(replace(second, out=wide)) is None, "its rows are further apart"
    shifted = torch.empty(16 * 256 + 1, dtype=second.out.dtype)[1:].view(16, 256)
    assert rebinder.to(replace(second, out=shifted)) is None, "the kernel is compiled for aligned addresses"
    assert ArgumentRebinder({**arguments, "copy": torch.empty(3)}, first).to(second) is None, (
        "not the address of an operand"
    )


def test_operands_at_one_address_must_share_an_address() -> None:
    _, (first, second, third) = _sets("a8w8_blockscale", 16)
    scale = first.inputs.x_scale
    shared = replace(first, inputs=replace(first.inputs, topk_weights=scale))
    rebinder = ArgumentRebinder({"scale": scale}, shared)
    assert rebinder.to(second) is None
    same_layout = replace(third, inputs=replace(third.inputs, topk_weights=third.inputs.x_scale))
    assert rebinder.to(same_layout) == {"scale": third.inputs.x_scale}
    assert len(tensors_of(first)) == 10
