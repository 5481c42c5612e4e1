"""Scratch: disjoint tensors of one call, in memory that the calls on a stream share by default."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.launch.workspace import Scratch, unshared_scratch

CPU = torch.device("cpu")
SHAPES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(
        st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple),
        st.sampled_from(["float32", "bfloat16", "int32", "float8_e4m3fn"]),
    ),
    min_size=1,
)


@given(shapes=SHAPES)
def test_tensors_are_disjoint_and_aligned(shapes: dict[str, tuple[tuple[int, ...], str]]) -> None:
    taken = Scratch().take(shapes, CPU)
    ranges = []
    for name, (shape, dtype) in shapes.items():
        tensor = taken[name]
        assert (tuple(tensor.shape), str(tensor.dtype)) == (shape, f"torch.{dtype}")
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 256 == 0
        ranges.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    for (_, end), (begin, _) in zip(sorted(ranges), sorted(ranges)[1:], strict=False):
        assert end <= begin


def test_calls_share_memory_and_a_larger_call_leaves_it_to_the_others() -> None:
    scratch = Scratch()
    small = scratch.take({"x": ((10,), "float32")}, CPU)["x"]
    assert scratch.take({"y": ((5,), "int32")}, CPU)["y"].data_ptr() == small.data_ptr()
    small.fill_(7)
    large = scratch.take({"x": ((10_000,), "float32")}, CPU)["x"]
    large.zero_()
    assert float(small.sum()) == 70


def test_unshared_scratch_is_not_kept() -> None:
    scratch = Scratch()
    with unshared_scratch():
        scratch.take({"x": ((10,), "float32")}, CPU)
    assert not scratch.held
