"""Triton's interpreter without its search for builtins: it lists all members of its language for each function called.

That takes a third of its time. Imported by the programs that interpret kernels, after TRITON_INTERPRET is set.
"""

import inspect
from types import SimpleNamespace

from triton.runtime import interpreter

NAMES: dict[int, list[str]] = {}
"""Of Triton's builtins, by the id of the module or class that has them."""


def builtins_of(owner: object) -> list[tuple[str, object]]:
    """The members that Triton replaces for each function that a program calls: listing all takes long."""
    if id(owner) not in NAMES:
        NAMES[id(owner)] = [
            name for name, member in inspect.getmembers(owner) if interpreter.tl.core.is_builtin(member)
        ]
    return [(name, getattr(owner, name)) for name in NAMES[id(owner)]]


interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": builtins_of})
