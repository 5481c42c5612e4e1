"""What a product costs at least: operations, and bytes that must move."""

from gemmpipe.family import GemmSpec, Scaling


def flops(spec: GemmSpec) -> float:
    """2 * M * N * K, times the batch."""
    return 2.0 * spec.batch * spec.m * spec.n * spec.k


def bytes_moved(spec: GemmSpec) -> float:
    """Every operand read once and the output written once, scales and bias included."""
    from gemmpipe.operands import bytes_of

    x = bytes_of(spec.x_dtype, spec.m * spec.k) + _scale_bytes(spec.x_scale, spec.m, spec.k)
    w = bytes_of(spec.w_dtype, spec.n * spec.k) + _scale_bytes(spec.w_scale, spec.n, spec.k)
    out = bytes_of(spec.out_dtype, spec.m * spec.n + (spec.n if spec.bias else 0))
    return float(spec.batch * (x + w + out))


def _scale_bytes(scaling: Scaling | None, rows: int, columns: int) -> int:
    from gemmpipe.operands import bytes_of, scale_count

    return bytes_of(scaling.dtype, scale_count(scaling, rows, columns)) if scaling else 0
