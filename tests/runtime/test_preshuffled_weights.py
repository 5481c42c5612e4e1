"""16-bit weights in aiter's tiles: marked by an argument, never read as rows."""

import pytest
import torch

from gemmpipe.core.errors import UserError
from gemmpipe.family.layouts import TILES_16X16, preshuffle
from gemmpipe.runtime import dispatch_report, gemm_a16w16


def _close(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    torch.testing.assert_close(y.float(), x.float() @ w.float().T, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", ["bfloat16_convert", "bfloat16_copy", "float32_copy"])
def test_each_layout_has_rows_and_forms_of_its_own(method: str, row, table, x, w) -> None:
    table(
        row(3, "torch", {"method": method}, bpreshuffle=True),
        row(3, "torch", {"method": "float32_copy"}),
    )
    tiles = preshuffle(w, TILES_16X16)
    for _ in range(2):
        _close(gemm_a16w16(x(3), tiles, bpreshuffle=True), x(3), w)
        _close(gemm_a16w16(x(3), w), x(3), w)
        _close(gemm_a16w16(x(3), tiles), x(3), tiles)  # the same memory, read as rows
    assert set(dispatch_report().values()) == {"exact"}


@pytest.mark.compile
def test_the_fallback_runs_and_a_compiler_has_an_operator(x, w) -> None:
    tiles = preshuffle(w, TILES_16X16)
    flat = gemm_a16w16(x(2, 5), tiles, bpreshuffle=True)
    assert flat.shape == (2, 5, w.shape[0])
    _close(flat.view(10, -1), x(2, 5).view(10, -1), w)
    with torch.no_grad():
        compiled = torch.compile(lambda a: gemm_a16w16(a, tiles, bpreshuffle=True), fullgraph=True, backend="eager")
        _close(compiled(x(7)), x(7), w)


def test_impossible_input_is_refused(x, w) -> None:
    tiles = preshuffle(w, TILES_16X16)
    with pytest.raises(UserError, match=r"^gemm_a16w16 with bpreshuffle: products of .* record no gradients"):
        gemm_a16w16(x(3), tiles.requires_grad_(), bpreshuffle=True)
    with pytest.raises(UserError, match=r"gemm_a16w16: .*float16"):
        gemm_a16w16(x(3).half(), tiles.detach().half(), bpreshuffle=True)
    marked = tiles.detach().clone()
    marked.is_shuffled = True  # as aiter's shuffle_weight does
    with pytest.raises(UserError, match=r"gemm_a16w16: w is shuffled \(w.is_shuffled\), expected bpreshuffle=True"):
        gemm_a16w16(x(4), marked)
    _close(gemm_a16w16(x(4), marked, bpreshuffle=True), x(4), w)
