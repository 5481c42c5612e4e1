"""Invalid operands of a product: a one-line error, after any earlier calls."""

from collections.abc import Callable

import numpy
import pytest
import torch

from gemmpipe.core.errors import UserError
from gemmpipe.runtime import (
    batched_gemm_bf16,
    fused_moe,
    gemm_a4w4_blockscale,
    gemm_a8w8,
    gemm_a8w8_blockscale,
    gemm_a8w8_blockscale_bpreshuffle,
    gemm_a8w8_bpreshuffle,
    gemm_a16w16,
    gemm_a16w16_atomic,
    linear_fp8,
)

X, W = torch.randn(8, 64).bfloat16(), torch.randn(32, 64).bfloat16()
FP8, ONE = torch.float8_e4m3fn, torch.ones(1)
X8, W8, X_SCALE, W_SCALE = X.to(FP8), W.to(FP8), torch.ones(8, 1), torch.ones(32, 1)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("value", "what"), [(None, "None"), ([[1.0]], "of type list"), (numpy.ones((8, 64)), "of type ndarray")]
)
def test_what_is_no_tensor(value: object, what: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        for operands, word in (((value, W), "x"), ((X, value), "w")):
            with pytest.raises(UserError, match=f"^gemm_a16w16: {word} is {what}, expected a tensor$"):
                gemm_a16w16(*operands)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^gemm_a16w16: bias is of type bool, expected a tensor or None$"):
        gemm_a16w16(X, W, bias=False)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^gemm_a8w8_blockscale: x_scale is of type float, expected a tensor or None$"):
        gemm_a8w8_blockscale(X, W, 2.0, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^gemm_a4w4_blockscale: x is None"):
        gemm_a4w4_blockscale(None, W, W, W)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^gemm_a8w8_bpreshuffle: w is None"):
        gemm_a8w8_bpreshuffle(X8, None, X_SCALE, W_SCALE)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^gemm_a8w8_blockscale_bpreshuffle: x is None"):
        gemm_a8w8_blockscale_bpreshuffle(None, W8, X_SCALE, W_SCALE)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^gemm_a16w16: out_dtype is 'bfloat16', expected a torch.dtype$"):
        gemm_a16w16(X, W, out_dtype="bfloat16")  # type: ignore[arg-type]


def test_an_operand_without_memory_is_reported_though_its_shapes_are_known() -> None:
    """A layer without memory next to a loaded one of the same size."""
    for _ in range(2):
        assert gemm_a16w16(X, W).shape == (8, 32)
        with pytest.raises(UserError, match=r"^gemm_a16w16: w is on meta, expected cpu as x$"):
            gemm_a16w16(X, W.to("meta"))
    assert gemm_a16w16(X.to("meta"), W.to("meta")).is_meta


def test_an_unsupported_device_is_reported() -> None:
    """Zeros would look like a result."""

    class Elsewhere(torch.Tensor):
        """A tensor on a device that this machine lacks."""

        @classmethod
        def __torch_dispatch__(cls, func: object, *others: object) -> object:
            raise AssertionError(func)

    def there(like: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.Tensor._make_wrapper_subclass(Elsewhere, like.shape, dtype=like.dtype, device="xpu")  # type: ignore[attr-defined]
        return made

    with torch.inference_mode(), pytest.raises(UserError, match=r"^gemm_a16w16: x is on xpu.*, expected cpu, cuda"):
        gemm_a16w16(there(X), there(W))


def test_batches_are_those_families_that_have_them() -> None:
    several = X.view(2, 4, 64), torch.stack((W, W))
    assert batched_gemm_bf16(*several).shape == (2, 4, 32)
    with pytest.raises(UserError, match=r"w \[2, 32, 64\], expected \[\.\.\., K\] and \[N, K\]$"):
        gemm_a16w16(*several)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: gemm_a16w16(X8, W8), "gemm_a16w16: x_scale: none, expected float32 [1]"),
        (lambda: gemm_a16w16(X8, W8, w_scale=ONE), "gemm_a16w16: x_scale: none, expected float32 [1]"),
        (lambda: gemm_a16w16(X8, W8, x_scale=ONE), "gemm_a16w16: w_scale: none, expected float32 [1]"),
        (lambda: gemm_a16w16(X, W, x_scale=ONE), "gemm_a16w16: x_scale: given, expected none for bfloat16 operands"),
        (lambda: gemm_a16w16(X, W8), "gemm_a16w16: x is bfloat16 and w float8_e4m3fn, expected one type"),
        (lambda: gemm_a16w16(X.int(), W.int()), "gemm_a16w16: x and w are int32, expected bfloat16 or float16"),
        (
            lambda: gemm_a16w16(X, W, out_dtype=torch.float64),
            "gemm_a16w16: out_dtype is float64, expected bfloat16, float16 or float32",
        ),
        (
            lambda: gemm_a16w16_atomic(X8, W8),
            "gemm_a16w16_atomic: x and w are float8_e4m3fn, expected bfloat16 or float16",
        ),
        (lambda: gemm_a8w8(X8, W8, None, None), "gemm_a8w8: x_scale: none, expected float32 [8, 1]"),
        (lambda: gemm_a8w8(X8, W8, None, None, None, None), "gemm_a8w8: x_scale: none, expected float32 [8, 1]"),
        (
            lambda: gemm_a8w8(X, W, X_SCALE, W_SCALE),
            "gemm_a8w8: x and w are bfloat16, expected float8_e4m3fn, float8_e4m3fnuz or int8",
        ),
        (
            lambda: gemm_a8w8_bpreshuffle(X8, W8[:24], X_SCALE, W_SCALE[:24]),
            "gemm_a8w8_bpreshuffle: a pre-shuffled weight of 24 x 64, expected multiples of 16 x 32",
        ),
    ],
)
def test_wrong_types_are_reported_by_argument(call: Callable[[], torch.Tensor], line: str) -> None:
    """The error names arguments, not the key of a table."""
    with torch.no_grad(), pytest.raises(UserError) as error:
        call()
    assert str(error.value) == line


BLOCKS, BOTH_FORMS = torch.ones(1, 1), "expected float32 [1, 1], or [32] or [32, 1] by row"


@pytest.mark.parametrize("scale", [BLOCKS, W_SCALE], ids=["blocks", "rows"])
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"x": X.float()}, "x is float32, expected bfloat16 or float16"),
        ({"x": X.float(), "out_dtype": torch.bfloat16}, "x is float32, expected bfloat16 or float16"),
        ({"x": X8}, "x is float8_e4m3fn, expected bfloat16 or float16"),
        ({"w": W.to(torch.float8_e5m2)}, "w is float8_e5m2, expected float8_e4m3fn or float8_e4m3fnuz"),
        ({"w": W}, "w is bfloat16, expected float8_e4m3fn or float8_e4m3fnuz"),
        ({"out_dtype": torch.float32}, "out_dtype is float32, expected bfloat16 for x in bfloat16"),
        ({"out_dtype": torch.float16}, "out_dtype is float16, expected bfloat16 for x in bfloat16"),
        ({"w_scale": None}, "w_scale is None, expected a tensor"),
        ({"w_scale": torch.ones(33)}, f"w_scale: float32 [33], {BOTH_FORMS}"),
        ({"w_scale": torch.ones(33, 1)}, f"w_scale: float32 [33, 1], {BOTH_FORMS}"),
        ({"w_scale": torch.ones(1, 32)}, f"w_scale: float32 [1, 32], {BOTH_FORMS}"),
        ({"w_scale": W_SCALE.half()}, "w_scale: float16 [32, 1], expected float32 [32, 1]"),
        ({"w_scale": BLOCKS.half()}, "w_scale: float16 [1, 1], expected float32 [1, 1]"),
    ],
)
def test_a_linear_layer_in_fp8_names_the_operand_that_is_wrong(
    change: dict[str, torch.Tensor], line: str, scale: torch.Tensor
) -> None:
    """x and w have different types, and w's scales one of two forms."""
    with torch.no_grad(), pytest.raises(UserError) as error:
        linear_fp8(**{"x": X, "w": W8, "w_scale": scale, **change})
    assert str(error.value) == f"linear_fp8: {line}"


def test_under_autocast_too() -> None:
    """Only wide operands are cast: a quantised one would silently lose its scales."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(UserError, match=r"^gemm_a16w16: w is None, expected a tensor$"):
            gemm_a16w16(X, None)  # type: ignore[arg-type]
        for wrong in ((X8, W8), (X8.float(), W8)):
            with pytest.raises(UserError, match=r"^gemm_a16w16: [^\n]+$"):
                gemm_a16w16(*wrong)
        with pytest.raises(UserError, match=r"^gemm_a8w8: x_scale: none, expected float32 \[8, 1\]$"):
            gemm_a8w8(X8, W8, None, None)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"^fused_moe: w1 is None, expected a tensor$"):
            fused_moe(X, None, None, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: gemm_a16w16(x, W, w_scale=ONE), "^gemm_a16w16: products of scaled operands record no gradients"),
        (lambda x: linear_fp8(x, W8, W_SCALE), "^linear_fp8: products of scaled operands record no gradients"),
        (lambda x: linear_fp8(x, W8, BLOCKS), "^linear_fp8: products of scaled operands record no gradients"),
        (lambda x: gemm_a16w16(x, W[:, :5]), r"x \[8, 64\] and w \[32, 5\], expected"),
        (lambda x: gemm_a16w16(x, W, torch.ones(3)), r"bias \[3\], expected \[32\]"),
        (lambda x: gemm_a16w16(x, W, out_dtype=torch.int32), "out_dtype is int32, expected bfloat16, float16"),
        (lambda x: gemm_a16w16(x, W, out_dtype="float32"), "out_dtype is 'float32', expected a torch.dtype"),
        (lambda x: gemm_a8w8_bpreshuffle(x, W, None, None), "x and w are bfloat16, expected float8_e4m3fn"),
    ],
)
def test_where_gradients_are_recorded_too(call: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    """torch's own product supports neither scales nor weights in tiles."""
    with pytest.raises(UserError, match=message) as error:
        call(X.clone().requires_grad_())
    assert "\n" not in str(error.value)
    assert gemm_a16w16(X.clone().requires_grad_(), W).requires_grad
