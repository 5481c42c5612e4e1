"""The operand types of families, and checks of a problem's options against them."""

from collections.abc import Sequence

from gemmpipe.core.errors import UserError, suggest
from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.family import KernelDefaults, KeyColumn

DTYPES_16BIT = ("bfloat16", "float16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz")
DTYPES_8BIT = (*FP8_DTYPES, "int8")
FP4 = "float4_e2m1fn_x2"
"""Two e2m1 values in a byte."""
FP8_MAX = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 240.0}
"""The greatest value of each fp8 format."""
OUT_DTYPES = (*DTYPES_16BIT, "float32")
SCALE_ORDERS = (ROW, COLUMN)
"""Memory orders of x's block scales; None means both (see Scaling.order)."""
X_SCALE_COLUMN = KeyColumn(
    name="x_scale", kind="str", choices=tuple((order, order) for order in SCALE_ORDERS), optional=True
)
"""The key column of families in which a workload may have x's block scales in either order."""


def native_fp8(gfx: str) -> str:
    """The fp8 format of an architecture's matrix instructions: e4m3fnuz on gfx942, e4m3fn on all others."""
    return "float8_e4m3fnuz" if gfx == "gfx942" else "float8_e4m3fn"


def check_choice(where: str, value: str, known: Sequence[str]) -> str:
    """The value, if it is known. Raises UserError with `where` and the nearest known value."""
    if value not in known:
        one_of = f"one of {', '.join(known)}" if len(known) > 1 else known[0]
        raise UserError(f"{where}: '{value}', expected {one_of}{suggest(value, known)}")
    return value


def reject_bias(kernel: KernelDefaults, family: str) -> None:
    """Raise UserError if a bias is requested from a family without bias."""
    if kernel.bias:
        raise UserError(f"kernel.bias: true, expected false or null ({family} has no bias)")


def element_bytes(dtype: str) -> float:
    """Bytes per element of an operand: 0.5 for 4-bit types, 1 for 8-bit, 2 for 16-bit; not for wider types."""
    if dtype.startswith("float4"):
        return 0.5
    return 1 if dtype.startswith("float8") or dtype == "int8" else 2
