"""The operand types that families choose from, and the words of a problem held against them."""

from collections.abc import Sequence

from gemmpipe.core.errors import UserError, suggest
from gemmpipe.core.spec import COLUMN, ROW
from gemmpipe.family import KernelDefaults, KeyColumn

DTYPES_16BIT = ("bfloat16", "float16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz")
DTYPES_8BIT = (*FP8_DTYPES, "int8")
OUT_DTYPES = (*DTYPES_16BIT, "float32")
SCALE_ORDERS = (ROW, COLUMN)
"""How block scales of x may lie in memory; None stands for both (see Scaling.order)."""
X_SCALE_COLUMN = KeyColumn(
    name="x_scale", kind="str", words=tuple((order, order) for order in SCALE_ORDERS), optional=True
)
"""The key column of families whose workloads may have x's block scales in either order."""


def native_fp8(gfx: str) -> str:
    """The fp8 format that an architecture multiplies: e4m3fnuz on gfx942, e4m3fn on everything else."""
    return "float8_e4m3fnuz" if gfx == "gfx942" else "float8_e4m3fn"


def check_choice(where: str, word: str, known: Sequence[str]) -> str:
    """The word, if it is a known one. Raises UserError naming `where` and the nearest known one."""
    if word not in known:
        one_of = f"one of {', '.join(known)}" if len(known) > 1 else known[0]
        raise UserError(f"{where}: '{word}', expected {one_of}{suggest(word, known)}")
    return word


def reject_bias(kernel: KernelDefaults, family: str) -> None:
    """Raises UserError when a bias is asked of a family that has none."""
    if kernel.bias:
        raise UserError(f"kernel.bias: true, expected false or null ({family} has no bias)")


def element_bytes(dtype: str) -> float:
    """0.5 for 4-bit operands, 1 for 8-bit, 2 for 16-bit ones."""
    if dtype.startswith("float4"):
        return 0.5
    return 1 if dtype.startswith("float8") or dtype == "int8" else 2
