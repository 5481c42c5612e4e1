"""What a product costs at least: operations, and bytes that must move."""

from gemmpipe.family import GemmSpec, Scaling


def flops(spec: GemmSpec) -> float:
    """2 * M * N * K, times the batch."""
    return 2.0 * spec.batch * spec.m * spec.n * spec.k


def bytes_moved(spec: GemmSpec) -> float:
    """Every operand read once and the output written once, scales and bias included."""
    from gemmpipe.operands import dtype_of

    def size(name: str) -> int:
        return dtype_of(name).itemsize

    x = spec.m * spec.k * size(spec.x_dtype) + 4 * _scales(spec.x_scale, spec.m, spec.k)
    w = spec.n * spec.k * size(spec.w_dtype) + 4 * _scales(spec.w_scale, spec.n, spec.k)
    out = (spec.m * spec.n + (spec.n if spec.bias else 0)) * size(spec.out_dtype)
    return float(spec.batch * (x + w + out))


def _scales(scaling: Scaling | None, rows: int, columns: int) -> int:
    """How many scales an operand of [rows, columns] has."""
    if scaling is None:
        return 0
    if scaling.granularity == "block":
        return -(-rows // scaling.block[0]) * -(-columns // scaling.block[1])
    return 1 if scaling.granularity == "tensor" else rows
