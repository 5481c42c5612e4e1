"""Keys that mean no product of their family, told in the words of the function that was called."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import UserError
from gemmpipe.family import Family, GemmSpec
from gemmpipe.operand_types import EIGHT_BITS, OUT, WIDE

_SOME_OUT = {"outdtype": WIDE[0]}  # what every family can give


class Means:
    """What a key that means no product would mean if some of its values were others."""

    def __init__(self, family: Family, problem: Problem) -> None:
        self._family, self._problem = family, problem
        self.key = dict(problem.key)

    def spec(self, values: Mapping[str, Scalar]) -> GemmSpec | None:
        """The product with these values in place of the key's own; None: still none."""
        key = tuple((name, values.get(name, value)) for name, value in self._problem.key)
        try:
            return self._family.spec(replace(self._problem, key=key))
        except UserError:
            return None

    def likely(self) -> GemmSpec | None:
        """The product that these types are for, whatever comes out, and with scales or without."""
        others = {"scaleAB": not self.key["scaleAB"]} if "scaleAB" in self.key else {}
        return self.spec(_SOME_OUT) or self.spec({**_SOME_OUT, **others})

    def wrong_type(self, w: str, out: str) -> str | None:
        """What is wrong with the types of both operands or of what comes out; None: nothing."""
        if self.spec(_SOME_OUT) is not None:
            return f"out_dtype is {out}, expected {either([t for t in OUT if self.spec({'outdtype': t})])}"
        known = [t for t in (*WIDE, *EIGHT_BITS) if self.spec({**_SOME_OUT, "dtype": t, "q_dtype_w": t})]
        return f"x and w are {w}, expected {either(known)}" if known else None


def spec_of(family: Family, problem: Problem, mistake: Callable[[Means], str | None]) -> GemmSpec:
    """The product that the key means. Raises UserError: with `mistake`, or where that is None the family's own words.

    Keys are in a table's words, which nobody knows who calls a function.
    """
    try:
        return family.spec(problem)
    except UserError as error:
        found = mistake(Means(family, problem)) or str(error).removeprefix(f"{problem.id}: ").removeprefix(
            f"{family.name}: "
        )
        raise UserError(f"{family.entry_point}: {found}") from None


def either(words: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
