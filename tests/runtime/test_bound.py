"""A kernel bound once, without the kernel: what its launcher is given, call by call."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from gemmpipe.builds import Loaded
from gemmpipe.data import Build, Candidate, Device
from gemmpipe.device import arch_device
from gemmpipe.family import Family, GemmSpec, KernelDefaults, load_family
from gemmpipe.problem import make_problem
from gemmpipe.runtime.bound import tiled_call
from gemmpipe.runtime.choosing import Chosen
from gemmpipe.runtime.operands import Given

TILES = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_warps": 4, "num_stages": 2}


@dataclass
class Kernel:
    """Stands in for a compiled kernel and keeps what it was launched with."""

    launches: list[tuple[object, ...]] = field(default_factory=list)
    function, packed_metadata = "function", "metadata"

    def run(self, *arguments: object) -> None:
        self.launches.append(arguments)


class _Driver:
    @staticmethod
    def get_current_stream(device: int) -> int:
        return 7

    @staticmethod
    def get_current_device() -> int:
        return 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    from triton.runtime import driver

    made = Kernel()

    def load(build: Build, device: Device) -> Loaded:
        return Loaded(build=build, kernel=made, interpreted=False)

    for module in ("gemmpipe.runtime.bound", "gemmpipe.tiled"):
        monkeypatch.setattr(f"{module}.load_build", load)
    monkeypatch.setattr("gemmpipe.runtime.bound.on", lambda device: torch.no_grad())
    monkeypatch.setattr("gemmpipe.runtime.calls.on", lambda device: torch.no_grad())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(driver, "_active", _Driver())
    return made


def made(name: str, m: int, knobs: dict[str, object]) -> tuple[Given, GemmSpec, Chosen, Device]:
    family: Family = load_family(name)
    device = arch_device("sm_90")
    words = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, {"M": m, "N": 256, "K": 512}, words, device.gfx, "case"))
    generator = torch.Generator().manual_seed(1)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    (implementation,) = (i for i in family.implementations if i.label == "triton")
    knobs = dict(implementation.normalise(spec, {**TILES, **knobs}, device))
    given = Given(
        x=inputs.x, w=weights.w, x_scale=inputs.x_scale, w_scale=weights.w_scale, bias=None, out_dtype=torch.bfloat16
    )
    return given, spec, Chosen(implementation=implementation, candidate=Candidate.of("triton", knobs)), device


def arguments(kernel: Kernel, chosen: Chosen, spec: GemmSpec, device: Device) -> tuple[tuple[object, ...], dict]:
    """(grid and stream, parameter -> value) of the last launch, addresses of tensors in place of tensors."""
    (build,) = chosen.implementation.builds(spec, chosen.candidate.knobs, device)
    *head, _, _, _, _, _ = kernel.launches[-1][:9]
    values = dict(zip((name for name, _ in build.signature), kernel.launches[-1][9:], strict=True))
    return tuple(head), {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


@pytest.mark.parametrize("name", ["a16w16", "a8w8_blockscale", "a8w8_blockscale_bpreshuffle", "a8w8"])
@pytest.mark.parametrize("splits", [1, 2])
def test_it_launches_what_binding_each_time_would(kernel: Kernel, name: str, splits: int) -> None:
    given, spec, chosen, device = made(name, 32, {"NUM_KSPLIT": splits})
    call = tiled_call(chosen, spec, device, given, fresh_workspace=False)
    assert call is not None
    out = call(given.x, given.w, given.x_scale, given.w_scale, None)
    if name == "a8w8_blockscale_bpreshuffle":  # row-major scales are copied; M-major ones are read as they are
        given = Given(**{**vars(given), "x_scale": given.x_scale.mT.contiguous().mT})
        out = call(given.x, given.w, given.x_scale, given.w_scale, None)
    head, bound = arguments(kernel, chosen, spec, device)
    from gemmpipe.runtime.calls import any_call

    any_call(chosen, spec, device, torch.bfloat16)(given.x, given.w, given.x_scale, given.w_scale, None)
    head_each_time, each_time = arguments(kernel, chosen, spec, device)
    assert head == head_each_time
    assert bound.pop("out_ptr") == out.data_ptr()
    each_time.pop("out_ptr")
    assert bound == each_time, json.dumps([str(bound), str(each_time)])
    assert bound["x_ptr"] == given.x.data_ptr()


def test_other_operands_of_the_key_go_where_they_lie(kernel: Kernel) -> None:
    given, spec, chosen, device = made("a16w16", 32, {})
    call = tiled_call(chosen, spec, device, given, fresh_workspace=True)
    other = given.x.clone()
    call(other.view(2, 16, 512), given.w, None, None, None)
    assert arguments(kernel, chosen, spec, device)[1]["x_ptr"] == other.data_ptr()


@pytest.mark.parametrize("offset", [1, 4])
def test_addresses_and_strides_that_the_kernel_was_not_compiled_for_are_copied(kernel: Kernel, offset: int) -> None:
    given, spec, chosen, device = made("a16w16", 32, {})
    call = tiled_call(chosen, spec, device, given, fresh_workspace=True)
    shifted = torch.zeros(32 * 512 + offset, dtype=torch.bfloat16)[offset:].view(32, 512)
    strided = torch.zeros(32, 520, dtype=torch.bfloat16)[:, :512]
    weight = torch.zeros(512, 256, dtype=torch.bfloat16).t()
    for x, w in ((shifted, given.w), (strided, given.w), (given.x, weight)):
        call(x, w, None, None, None)
        values = arguments(kernel, chosen, spec, device)[1]
        assert values["x_ptr"] % 16 == values["w_ptr"] % 16 == 0
        assert (values["x_stride"], values["w_stride"]) == (512, 512)
        assert (values["x_ptr"] == x.data_ptr()) == (x is given.x)
        assert (values["w_ptr"] == w.data_ptr()) == (w is given.w)
