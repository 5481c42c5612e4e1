"""Pre-shuffled weights: conversion to aiter's order and back."""

import pytest
import torch

from gemmpipe.core.errors import UserError
from gemmpipe.family.layouts import (
    ROW_MAJOR,
    TILES_16X16,
    check_preshuffle_shape,
    k_major_tiles,
    preshuffle,
    unshuffle,
)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_tiles_are_in_aiters_order(dtype: torch.dtype) -> None:
    w = torch.randint(0, 120, (48, 96), dtype=torch.int8).view(dtype)
    stored = preshuffle(w, TILES_16X16)
    # aiter/ops/shuffle.py: tiles of 16 rows and 32 bytes, those in two halves of 16 bytes
    aiters = w.view(torch.int8).view(3, 16, 3, 2, 16).permute(0, 2, 3, 1, 4).reshape(48, 96)
    assert torch.equal(stored.view(torch.int8), aiters)
    flat, n, k = stored.view(torch.int8).flatten(), 37, 75
    assert flat[(n // 16) * 16 * 96 + (k // 16) * 256 + (n % 16) * 16 + k % 16] == w.view(torch.int8)[n, k]
    assert torch.equal(unshuffle(stored, TILES_16X16).view(torch.int8), w.view(torch.int8))
    assert unshuffle(w, ROW_MAJOR) is w
    runs = k_major_tiles(stored)
    assert runs.data_ptr() == stored.data_ptr()
    assert torch.equal(runs[4, 2].view(torch.int8), w.view(torch.int8)[32:48, 64:80].flatten())


def test_tiles_of_16_bit_weights_are_in_aiters_order() -> None:
    w = torch.randn(48, 96).bfloat16()
    stored = preshuffle(w, TILES_16X16)
    # aiter/ops/shuffle.py: tiles of 16 rows and 32 elements, those in four quarters of 16 bytes
    assert torch.equal(stored, w.view(3, 16, 3, 4, 8).permute(0, 2, 3, 1, 4).reshape(48, 96))
    assert torch.equal(unshuffle(stored, TILES_16X16), w)


def test_a_weight_that_cannot_be_tiled_is_refused() -> None:
    with pytest.raises(UserError, match="case: a pre-shuffled weight of 24 x 64, expected"):
        check_preshuffle_shape("case", 24, 64)
    with pytest.raises(ValueError, match="multiples of 16"):
        preshuffle(torch.zeros(16, 20, dtype=torch.int8), TILES_16X16)
    with pytest.raises(ValueError, match="of 8 or 16 bits"):
        preshuffle(torch.zeros(16, 32, dtype=torch.float32), TILES_16X16)
    with pytest.raises(ValueError, match="weight layout 'other'"):
        unshuffle(torch.zeros(16, 32, dtype=torch.int8), "other")
