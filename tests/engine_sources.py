"""Python sources of real engines, for tests of what is stated about them.

`.ci/engine_sources` downloads them and names their folder in ENGINE_SOURCES: `vllm-0.25.1/vllm/...` (unpacked wheels).
"""

import ast
import os
from functools import cache
from pathlib import Path

import pytest


def source_of(engine: str, version: str, path: str) -> str:
    """The text of a file in an engine's package; skips the test where the sources are not there."""
    root = os.environ.get("ENGINE_SOURCES", "")
    file = Path(root) / f"{engine}-{version}" / path
    if not root or not file.is_file():
        pytest.skip(f"no sources of {engine} {version}: ENGINE_SOURCES={root}")
    return _text(file)


@cache
def _text(file: Path) -> str:
    return file.read_text()


def definition(text: str, name: str) -> ast.AST:
    """The definition or assignment of a name in a module, also within classes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return node.value
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            assert node.value is not None
            return node.value
    raise AssertionError(f"the source has no {name}")


def function(text: str, name: str, **names: object):  # type: ignore[no-untyped-def]
    """A function of a module, compiled alone; `names` are the globals that it needs."""
    node = definition(text, name)
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list = []
    for argument in (*node.args.args, *node.args.kwonlyargs):
        argument.annotation = None
    node.returns = None
    module = ast.Module(body=[node], type_ignores=[])
    scope = dict(names)
    exec(compile(ast.fix_missing_locations(module), name, "exec"), scope)
    return scope[name]
