"""Hashes that identify kernels by their compiled code, without prose and names.

Every tuned row has the hash of its kernel. It covers the normalised syntax tree of a JIT function and of all functions
that it calls: docstrings, comments, annotations (except `constexpr`) and the names of functions and locals do not
count, so that edited prose and renames leave rows valid. Global names, and attributes of the user's modules, count by
their meaning: a function by its own hash, a NamedTuple by its fields, a constant by its value, any object of Triton and
any flag that is computed from the installed Triton by its name; keyword arguments by their position.

The names of an entry kernel's parameters do not count: the host passes arguments by name, and is not hashed either.
"""

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from types import ModuleType
from typing import Any

_CONSTEXPR = "constexpr"
_SKIPPED = ("ctx", "kind", "type_comment", "type_params", "simple")


def source_hash(function: Any) -> str:
    """12 hex digits: the hash of a JIT function's normalised code, including its callees and NamedTuples.

    Raises ValueError if its source is not a function definition.
    """
    return _hash_of(function.fn)


@cache  # of the Python function: to look up a JIT function, a cache would have Triton hash it
def _hash_of(python: Any) -> str:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(python))).body
    if not isinstance(definition, ast.FunctionDef):
        raise ValueError(f"{python.__qualname__}: expected a function")
    normaliser = _Normaliser(python, _locals_of(definition))
    definition.name = "function"
    return hashlib.sha256(_dump(normaliser.visit(definition)).encode()).hexdigest()[:12]


def same_kernel(before: str, now: str) -> bool:
    """True if two hashes of kernels (8 digits, as in `kernelName`) are for the same code.

    Earlier hashes are looked up in `earlier_hashes.json`, which lists kernels with equal binaries (of releases that
    hashed raw source), and calls of which only a launch beside the products changed, the instructions of the products'
    activation, or the programs that share a last round of tiles: their tiles are what they were.
    """
    return before == now or now in earlier_hashes().get(before, ())


@cache
def earlier_hashes() -> Mapping[str, list[str]]:
    """Earlier hashes, each with the later ones that rows of it are valid for."""
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

    def __init__(self, python: Any, local: Mapping[str, str]) -> None:
        self._python, self._local = python, local
        self._scope = {**python.__globals__, **inspect.getclosurevars(python).nonlocals}

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
        return ast.Name(id=self._meaning(node.id, self._scope.get(node.id)), ctx=node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replaces a function or constant of a user's module or class by its meaning; keeps other attributes."""
        found = self._object_of(node)
        if found is None or inspect.ismodule(found):
            return self.generic_visit(node)
        return ast.Name(id=self._meaning(node.attr, found), ctx=node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Names the keyword arguments of a function by their position among its parameters."""
        callee = self._object_of(node.func)
        own = _is_jit(callee) and not _is_tritons(callee)
        parameters = list(inspect.signature(callee.fn).parameters) if own else []
        for keyword in node.keywords:
            if keyword.arg in parameters:
                keyword.arg = f"parameter{parameters.index(keyword.arg)}"
        return self.generic_visit(node)

    def _object_of(self, node: ast.expr) -> Any:
        """The object of a global name, or of an attribute of a module or class; None for locals, and in Triton."""
        if isinstance(node, ast.Name):
            return None if node.id in self._local else self._scope.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        owner = self._object_of(node.value)
        is_owner = (inspect.ismodule(owner) or inspect.isclass(owner)) and not _is_tritons(owner)
        return getattr(owner, node.attr, None) if is_owner else None

    def _meaning(self, name: str, found: Any) -> str:
        """The meaning of a name in a kernel, as text."""
        if _is_jit(found):
            own = "this function" if found.fn is self._python else ""
            return name if _is_tritons(found) else own or f"function {source_hash(found)}"
        if inspect.isclass(found):
            return self._meaning_of_class(name, found)
        value = getattr(found, "value", found)  # of a constexpr or an enum's member
        if isinstance(value, bool):
            return _flag(name, value, inspect.getmodule(self._python))
        if isinstance(value, tuple | list):
            return f"values {[self._meaning(str(each), each) for each in value]}"
        if isinstance(value, dict):
            return f"values {[(key, self._meaning(str(each), each)) for key, each in value.items()]}"
        if isinstance(value, str | int | float | bytes) or type(value).__name__ == "dtype":
            return f"value {value!r}"
        return name if value is found else self._meaning(name, value)

    def _meaning_of_class(self, name: str, found: type) -> str:
        """The fields of an aggregate or a NamedTuple, with methods and defaults; the name of any other class."""
        if getattr(found, "__triton_aggregate__", False):
            methods = getattr(found, "hash_attrs", ())
            if any(getattr(each, "fn", None) is self._python for each in methods):
                return "this class"
            hashes = [self._meaning(getattr(each, "__name__", ""), each) for each in methods]
            return f"aggregate {list(found.__annotations__)} {hashes}"
        if issubclass(found, tuple) and hasattr(found, "_fields"):
            defaults: Mapping[str, object] = getattr(found, "_field_defaults", {})
            values = {field: self._meaning(field, default) for field, default in defaults.items()}
            return f"tuple{list(found._fields)}{values or ''}"
        return name


def _is_jit(found: Any) -> bool:
    return inspect.isfunction(getattr(found, "fn", None))


def _is_tritons(found: Any) -> bool:
    """True for a module of Triton, and for what is defined in one: their paths differ between versions."""
    name = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", None) or ""
    return bool(name.partition(".")[0] == "triton")


def _is_constexpr(annotation: ast.expr) -> bool:
    return _CONSTEXPR in ast.unparse(annotation)


def _flag(name: str, value: bool, module: ModuleType | None) -> str:
    """A boolean by its value; by its name where the module computes it from the installed Triton."""
    for expression in _assigned(module).get(name, ()):
        if isinstance(expression, ast.Call) and _is_constexpr(expression.func) and expression.args:
            expression = expression.args[0]
        read = [getattr(module, node.id, None) for node in ast.walk(expression) if isinstance(node, ast.Name)]
        if any(map(_is_tritons, read)):
            return name
    return f"value {value}"


@cache
def _assigned(module: ModuleType | None) -> Mapping[str, Sequence[ast.expr]]:
    """The expressions that a module's names are assigned, at its top level; none without a file, as in a notebook."""
    found: dict[str, list[ast.expr]] = {}
    try:
        source = inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):
        source = ""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
    return found
