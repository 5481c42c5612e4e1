"""Tensor descriptors of a bound kernel's operands: what the launcher gets is what Triton's own wrapper would make."""

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemmpipe.runtime import launcher
from gemmpipe.runtime.descriptors import DescriptorCache, encoded_launcher
from gemmpipe.runtime.launcher import bind_launch

triton = pytest.importorskip("triton")
TRITON_36 = triton.__version__.startswith("3.6.")
META = {"swizzle": 3, "elem_size": 1, "elem_type": 0, "block_size": [64, 128], "fp4_padded": False}
OTHER_META = {"swizzle": 2, "elem_size": 2, "elem_type": 1, "block_size": [64, 64], "fp4_padded": False}
SIGNATURE = {"x": "tensordesc<fp8e4nv[64,128]>", "w": "*fp8e4nv", "out": "tensordesc<bf16[64,64]>", "n": "i32"}
GRID = (4, 1, 1)


def descriptor(rows: int, columns: int) -> Any:
    base = torch.empty(rows, columns, dtype=torch.int8)
    return SimpleNamespace(base=base, shape=[rows, columns], strides=[columns, 1], padding="zero")


class CudaLauncher:
    """Triton's launcher with a compiled part that notes its arguments."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, wrap: Callable[..., Any]) -> None:
        self.given: list[tuple[object, ...]] = []
        self.launch = wrap(lambda *given: self.given.append(given), SIGNATURE, [META, OTHER_META])

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *arguments: object) -> None:
        self.launch(x, y, z, stream, function, False, self.launch_pdl, None, None, *arguments)


def loaded(run: CudaLauncher) -> Any:
    return SimpleNamespace(
        build=SimpleNamespace(signature=tuple(SIGNATURE.items()), constants=()),
        kernel=SimpleNamespace(run=run, function=77),
        triton_launcher=lambda *, launch_pdl: run,
        cluster_launch=lambda grid, cluster: (grid, ("metadata",)),
    )


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses in the order in which descriptors of them are encoded."""
    found: list[int] = []

    def encode(address: int, *others: object) -> tuple[object, ...]:
        found.append(address)
        return "encoded", address, str(others)

    utils = SimpleNamespace(fill_tma_descriptor=encode)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    return found


def arguments() -> dict[str, object]:
    return {"x": descriptor(40, 128), "w": torch.empty(8, dtype=torch.int8), "out": descriptor(40, 64), "n": 9}


@pytest.mark.skipif(not TRITON_36, reason="the compiled launcher of Triton 3.6")
def test_a_bound_kernel_gives_the_compiled_launcher_what_tritons_wrapper_would(encodings: list[int]) -> None:
    from triton.backends.nvidia.driver import wrap_handle_tensordesc

    given, others = arguments(), arguments()
    run = CudaLauncher(wrap_handle_tensordesc)
    ready = bind_launch(loaded(run), GRID, 1, given)
    for chosen in (given, others, given):
        encodings.clear()
        values = list(ready.values)
        for name in ("x", "out"):
            values[ready.positions[name]] = ready.descriptors[name][chosen[name].base.data_ptr()]  # type: ignore[attr-defined]
        values[ready.positions["w"]] = chosen["w"].data_ptr()  # type: ignore[attr-defined]
        ready.launch(5, values)
        run(*GRID, 5, 77, ("metadata",), None, None, None, *({**chosen, "w": chosen["w"].data_ptr()}).values())  # type: ignore[attr-defined]
        assert run.given[-2] == run.given[-1]
    assert len(run.given) == 6
    assert len(encodings) == 2, "the third time only Triton's wrapper encodes"
    assert set(ready.descriptors) == {"x", "out"}


def wrapped(start: object, indices: set[int], metadata: Sequence[object]) -> Callable[..., object]:
    launcher, tensordesc_indices, tensordesc_meta = start, indices, metadata

    def inner(*given: object) -> object:
        return launcher, tensordesc_indices, tensordesc_meta

    return inner


@pytest.mark.parametrize(
    ("launch", "described"),
    [
        (print, [0]),
        (lambda *given: None, [0]),
        (wrapped(print, {0, 2}, [META, META]), [0]),
        (wrapped(print, {0}, [META]), [1]),
        (wrapped(print, {0}, [META]), [0, 1]),
        (wrapped(print, {0}, [None]), [0]),
        (wrapped(print, {0}, []), [0]),
    ],
    ids=[
        "compiled",
        "other function",
        "not all are operands",
        "another one",
        "too many",
        "no tensor memory access",
        "unknown",
    ],
)
def test_another_launcher_encodes_descriptors_itself(launch: object, described: list[int]) -> None:
    assert encoded_launcher(launch, described) is None


def test_where_triton_encodes_a_launch_has_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Triton from 3.7 on, whose launcher has another form."""
    monkeypatch.setattr(launcher, "_DIRECT_LAUNCH_TRITON", "none")
    run = CudaLauncher(lambda start, signature, metadata: start)
    given = arguments()
    ready = bind_launch(loaded(run), GRID, 1, given)
    assert ready.positions == {"x": 0, "w": 1, "out": 2, "n": 3}
    assert ready.values == (None, None, None, 9)
    made: Any = ready.descriptors["x"][4096]
    assert (made.base.data_ptr(), made.shape, made.strides) == (4096, [40, 128], [128, 1])
    assert given["x"].base.shape == (40, 128), "the operands' own descriptor is left as it is"  # type: ignore[attr-defined]
    ready.launch(5, [made, 16, made, 9])
    assert run.given == [(*GRID, 5, 77, False, True, None, None, ("metadata",), None, None, None, made, 16, made, 9)]


def test_descriptors_keep_no_operands() -> None:
    pattern = descriptor(4, 4)
    operand = weakref.ref(pattern.base)
    cache = DescriptorCache(pattern)
    made: Any = cache[64]
    assert cache[64] is made
    del pattern
    assert operand() is None


def test_no_descriptor_is_encoded_of_an_address_that_no_kernel_takes() -> None:
    """The driver refuses one that is not divisible by 16; the call copies such an operand."""
    encoded: list[int] = []
    cache = DescriptorCache(descriptor(4, 4), lambda each: encoded.append(each.base.data_ptr()) or "encoded")  # type: ignore[attr-defined, func-returns-value]
    assert [cache[address] for address in (64, 72, 65, 64)] == ["encoded", None, None, "encoded"]
    assert encoded == [64]


def test_a_kernel_with_scratch_memory_is_launched_by_tritons_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_DIRECT_LAUNCH_TRITON", "")  # any version
    run = CudaLauncher(lambda start, signature, metadata: start)
    wrapped_calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaLauncher, "__call__", lambda self, *given: wrapped_calls.append(given))
    for scratch_bytes, calls in ((0, 0), (128, 1)):
        run.global_scratch_size = scratch_bytes
        bind_launch(loaded(run), GRID, 1, arguments()).launch(5, [])
        assert len(wrapped_calls) == calls
