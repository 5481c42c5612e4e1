"""Hashes that identify kernels by their compiled code, without prose and names.

Every tuned row has the hash of its kernel. It covers the normalised syntax tree of a JIT function and of all functions
that it calls: docstrings, comments, annotations (except `constexpr`) and the names of functions and locals do not
count, so that edited prose and renames leave rows valid. A global name counts by its meaning: a function by its own
hash, a NamedTuple by its fields, a constant by its value, any object of Triton by its name.
"""

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

_CONSTEXPR = "constexpr"
_SKIPPED = ("ctx", "kind", "type_comment", "type_params", "simple")


@cache
def source_hash(function: Any) -> str:
    """12 hex digits: the hash of a JIT function's normalised code, including its callees and NamedTuples.

    Raises ValueError if its source is not a function definition.
    """
    python = function.fn
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(python))).body
    if not isinstance(definition, ast.FunctionDef):
        raise ValueError(f"{python.__qualname__}: expected a function")
    normaliser = _Normaliser(python.__globals__, _locals_of(definition))
    definition.name = "function"
    return hashlib.sha256(_dump(normaliser.visit(definition)).encode()).hexdigest()[:12]


def same_kernel(before: str, now: str) -> bool:
    """True if two hashes of kernels (8 digits, as in `kernelName`) are for the same code.

    Hashes of releases that hashed raw source are looked up in `earlier_hashes.json`, which lists kernels with equal
    binaries.
    """
    return before == now or now in earlier_hashes().get(before, ())


@cache
def earlier_hashes() -> Mapping[str, list[str]]:
    """Hashes of earlier releases, each with the current hashes of the same code."""
    found: dict[str, list[str]] = json.loads((files(__package__) / "earlier_hashes.json").read_text())
    return found


def _dump(node: object) -> str:
    """A syntax tree as text, equal in all versions of Python: empty fields are omitted."""
    if isinstance(node, list):
        return f"[{','.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, getattr(node, name, None)) for name in node._fields if name not in _SKIPPED)
    parts = (f"{name}={_dump(value)}" for name, value in fields if value is not None and value != [])
    return f"{type(node).__name__}({','.join(parts)})"


def _locals_of(definition: ast.FunctionDef) -> dict[str, str]:
    """Normalised names of parameters and assigned names: `local` and a number in order of appearance."""
    names: dict[str, str] = {}
    for node in ast.walk(definition):
        name = None
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name is not None and name not in names:
            names[name] = f"local{len(names)}"
    return names


class _Normaliser(ast.NodeTransformer):
    """Replaces names by their meaning, and removes parts that are not compiled."""

    def __init__(self, scope: Mapping[str, object], local: Mapping[str, str]) -> None:
        self._scope, self._local = scope, local

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Removes the docstring and the return type."""
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body = node.body[1:] or [ast.Pass()]
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Keeps the annotation `constexpr`, which affects the compiled code, and no other."""
        constant = node.annotation is not None and _is_constexpr(node.annotation)
        kept = ast.Name(id=_CONSTEXPR, ctx=ast.Load()) if constant else None
        return ast.arg(arg=self._local.get(node.arg, node.arg), annotation=kept)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Keeps the annotation `constexpr`; any other annotated assignment becomes a plain one."""
        target, value = self.visit(node.target), self.visit(node.value) if node.value is not None else None
        if _is_constexpr(node.annotation) or value is None:
            name = ast.Name(id=_CONSTEXPR, ctx=ast.Load())
            return ast.AnnAssign(target=target, annotation=name, value=value, simple=node.simple)
        return ast.Assign(targets=[target], value=value)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Replaces a local by its number, a global by its meaning."""
        if node.id in self._local:
            return ast.Name(id=self._local[node.id], ctx=node.ctx)
        return ast.Name(id=_resolved_global(node.id, self._scope.get(node.id)), ctx=node.ctx)


def _is_constexpr(annotation: ast.expr) -> bool:
    name = annotation.attr if isinstance(annotation, ast.Attribute) else getattr(annotation, "id", "")
    return name == _CONSTEXPR


def _resolved_global(name: str, found: object) -> str:
    """The meaning of a global name in a kernel, as text."""
    module = getattr(found, "__module__", None) or ""
    if inspect.isclass(found) and issubclass(found, tuple) and hasattr(found, "_fields"):
        return f"tuple{list(found._fields)}"
    if inspect.isfunction(getattr(found, "fn", None)):
        return name if module.startswith("triton") else f"function {source_hash(found)}"
    if inspect.ismodule(found):
        return name  # the paths of Triton's modules differ between versions
    value = getattr(found, "value", found)  # of a constexpr
    if isinstance(value, bool):
        return name  # a feature flag of the installed Triton
    if isinstance(value, str | int | float | tuple):
        return f"value {value!r}"
    return name
