"""What a kernel is known by: the hash of its code without what the compiler does not see.

A hash stands beside every tuned row. It covers the normalised syntax tree of a JIT function and of all that it calls:
docstrings, comments, annotations (but `constexpr`) and the names of functions and of their locals do not count, so
that prose and renames leave rows valid. What a global name stands for counts by its value: another function by its own
hash, a NamedTuple by its fields, a constant by itself, anything of Triton by its name.
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
    """12 hex digits of a JIT function's normalised code and of what it calls or groups values by, wherever it lies."""
    python = function.fn
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(python))).body
    if not isinstance(definition, ast.FunctionDef):
        raise ValueError(f"{python.__qualname__}: expected a function")
    words = _Normaliser(python.__globals__, _locals_of(definition))
    definition.name = "function"
    return hashlib.sha256(_dump(words.visit(definition)).encode()).hexdigest()[:12]


def same_kernel(before: str, now: str) -> bool:
    """Whether two hashes of kernels (8 digits, as `kernelName` carries them) stand for the same code.

    Those of releases that hashed raw source are looked up in `earlier_hashes.json`, which names kernels whose binaries
    are the same.
    """
    return before == now or now in earlier_hashes().get(before, ())


@cache
def earlier_hashes() -> Mapping[str, list[str]]:
    """The hash of a release before -> those of the same code now."""
    found: dict[str, list[str]] = json.loads((files(__package__) / "earlier_hashes.json").read_text())
    return found


def _dump(node: object) -> str:
    """A syntax tree as text that is the same under every version of Python: what is empty is left out."""
    if isinstance(node, list):
        return f"[{','.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, getattr(node, name, None)) for name in node._fields if name not in _SKIPPED)
    said = (f"{name}={_dump(value)}" for name, value in fields if value is not None and value != [])
    return f"{type(node).__name__}({','.join(said)})"


def _locals_of(definition: ast.FunctionDef) -> dict[str, str]:
    """Parameters and names that are assigned -> a number in the order of their appearance."""
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
    """Replaces names by what they stand for, and drops what is not compiled."""

    def __init__(self, scope: Mapping[str, object], local: Mapping[str, str]) -> None:
        self._scope, self._local = scope, local

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Without docstring and the type that it returns."""
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body = node.body[1:] or [ast.Pass()]
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Whether a parameter is a constant decides what is compiled; other annotations do not."""
        constant = node.annotation is not None and _is_constexpr(node.annotation)
        kept = ast.Name(id=_CONSTEXPR, ctx=ast.Load()) if constant else None
        return ast.arg(arg=self._local.get(node.arg, node.arg), annotation=kept)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """A constant stays one, any other annotated assignment is a plain one."""
        target, value = self.visit(node.target), self.visit(node.value) if node.value is not None else None
        if _is_constexpr(node.annotation) or value is None:
            name = ast.Name(id=_CONSTEXPR, ctx=ast.Load())
            return ast.AnnAssign(target=target, annotation=name, value=value, simple=node.simple)
        return ast.Assign(targets=[target], value=value)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A local by its number, a global by what it stands for."""
        if node.id in self._local:
            return ast.Name(id=self._local[node.id], ctx=node.ctx)
        return ast.Name(id=_resolved_global(node.id, self._scope.get(node.id)), ctx=node.ctx)


def _is_constexpr(annotation: ast.expr) -> bool:
    name = annotation.attr if isinstance(annotation, ast.Attribute) else getattr(annotation, "id", "")
    return name == _CONSTEXPR


def _resolved_global(name: str, found: object) -> str:
    """What a global name of a kernel stands for."""
    module = getattr(found, "__module__", None) or ""
    if inspect.isclass(found) and issubclass(found, tuple) and hasattr(found, "_fields"):
        return f"tuple{list(found._fields)}"
    if inspect.isfunction(getattr(found, "fn", None)):
        return name if module.startswith("triton") else f"function {source_hash(found)}"
    if inspect.ismodule(found):
        return name  # where Triton keeps a module changes from version to version
    value = getattr(found, "value", found)  # of a constexpr
    if isinstance(value, bool):
        return name  # says what the installed Triton has
    if isinstance(value, str | int | float | tuple):
        return f"value {value!r}"
    return name
