"""Triton's interpreter without the work that it repeats for each function and operation.

For each function that a program calls it lists all members of its language and replaces them again, and for each
operation it makes a table of types: half of its time. Imported by the programs that interpret kernels, after
TRITON_INTERPRET is set.
"""

import gc
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter

NAMES: dict[int, list[str]] = {}
"""Members of Triton's builtins, by the id of their module or class."""


def builtins_of(owner: object) -> list[tuple[str, object]]:
    """The members that Triton replaces for each function that a program calls: listing all takes long."""
    if id(owner) not in NAMES:
        NAMES[id(owner)] = [
            name for name, member in inspect.getmembers(owner) if interpreter.tl.core.is_builtin(member)
        ]
    return [(name, getattr(owner, name)) for name in NAMES[id(owner)]]


interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": builtins_of})


plain_type = interpreter._get_np_dtype
scalar_type = cache(plain_type)


def numpy_type(of: Any) -> Any:
    """The NumPy type of the elements of a Triton type: that of scalars is remembered, pointers have no hash."""
    element = of.element_ty if isinstance(of, interpreter.tl.block_type) else of
    return (plain_type if isinstance(element, interpreter.tl.pointer_type) else scalar_type)(element)


interpreter._get_np_dtype = numpy_type

if hasattr(interpreter, "_LangPatchScope"):  # the interpreter of Triton 3.6 patches in another way
    patch: Callable[[Any], Any] = interpreter._patch_lang
    patched: set[frozenset[int]] = set()
    """The sets of language modules that are replaced until the running kernel ends, by their ids."""

    def patch_once(function: Any) -> Any:
        """Replaces the members of the language modules that a function sees, unless the running kernel has done so."""
        known = (id(interpreter.tl), id(interpreter.tl.core))
        seen = frozenset(id(value) for value in function.__globals__.values() if id(value) in known)
        if seen in patched:
            return interpreter._LangPatchScope()
        is_kernel = not patched
        scope = patch(function)
        patched.add(seen)
        if is_kernel:
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once

if not os.environ.get("CHECK_OVERFLOW"):  # a third of the time of a kernel: each sum is computed in 64 bits, too
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

gc.set_threshold(100_000, 20, 50)
