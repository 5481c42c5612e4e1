"""Imports point down, the machinery names no family, and importing loads and touches nothing heavy."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gemmpipe.core.paths import PACKAGE, shipped

LAYERS = {
    "cli": 8,
    "recipe": 8,
    "__main__": 8,
    "config": 7,
    "space_words": 7,
    "typed": 7,
    "chain": 6,
    "plan": 6,
    "runner": 6,
    "doctor": 6,
    "manifest": 6,
    "report": 6,
    "tune": 6,
    "stages": 5,
    "executors": 4,
    "jobs": 4,
    "preloaded": 4,
    "worker": 4,
    "workbench": 4,
    "runtime": 3,
    "backends": 2,
    "sources": 2,
    "formats": 2,
    "search": 2,
    "kernels": 2.5,
    "data": 0,
    "events": 0,
    "errors": 0,
    "paths": 0,
    "starting": 0,
    "__init__": 0,
}
"""By the first part of the name; what is not listed is layer 1."""
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
MACHINERY = [path for path in FILES if path.relative_to(PACKAGE).parts[0] != "kernels"]
FAMILIES = sorted(path.parent.name for path in (PACKAGE / "kernels").glob("*/__init__.py"))


def _layer(name: str) -> float:
    return LAYERS.get(name, 1)


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path, *, when_run: bool) -> list[str]:
    """Modules that a file imports; `when_run` leaves out those for type checkers alone."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and when_run:
            skipped |= {inner for child in node.body for inner in ast.walk(child)}
    found: list[str] = []
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found += [f"{module}.{alias.name}" for alias in node.names] if module == "gemmpipe" else [module]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = _layer(_name(path))
    for module in _imports(path, when_run=True):
        parts = module.split(".")
        assert parts[0] != "kernels", f"{path}: import it as gemmpipe.kernels"
        if parts[0] == "gemmpipe" and len(parts) > 1 and not parts[1].startswith("__"):
            assert _layer(parts[1]) <= own, f"{path} imports {module}, which lies above it"
        if parts[0] in {"hydra", "omegaconf"}:
            assert _name(path) in {"cli", "recipe", "config"}, f"{path} imports {module}"
        if parts[0] == "pandas":
            assert _name(path) not in {"runtime", "worker", "workbench", "jobs", "kernels", "backends"}, path


@pytest.mark.parametrize("path", MACHINERY, ids=lambda p: str(p.name))
def test_the_machinery_names_no_family(path: Path) -> None:
    if _name(path) in {"runtime", "sources"}:
        pytest.skip("entry points and readers of others' tables say whose they are")
    text = path.read_text()
    code = "\n".join(ast.unparse(node) for node in ast.parse(text).body if not isinstance(node, ast.Expr))
    strings = [n.value for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    docstrings = {ast.get_docstring(n, clean=False) for n in ast.walk(ast.parse(code)) if isinstance(n, _DOCUMENTED)}
    for family in FAMILIES:
        for value in strings:
            assert value in docstrings or not re.search(rf"\b{family}\b", value), f"{path}: '{value}'"


_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def _loaded(code: str, names: str) -> set[str]:
    """Which of these modules are loaded after running the code in a fresh process."""
    script = f"{code}\nimport sys\nprint(*[m for m in {names.split()!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_is_lazy() -> None:
    assert _loaded("import gemmpipe", "torch triton pandas hydra omegaconf numpy yaml tqdm") == set()
    assert _loaded("import gemmpipe.cli.main", "torch triton pandas hydra numpy") == set()


def test_a_worker_needs_neither_pandas_nor_hydra() -> None:
    assert _loaded("import gemmpipe.bench.worker", "pandas hydra omegaconf") == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_importing_a_module_touches_no_device(path: Path) -> None:
    """At import, nothing is called that asks torch about devices."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            continue
        assert "torch.cuda." not in ast.unparse(node), f"{path}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_the_environment_belongs_to_a_few_variables() -> None:
    known = {
        "GEMMPIPE_CONFIG_",
        "GEMMPIPE_CAPTURE",
        "GEMMPIPE_LOG_SELECTION",
        "GEMMPIPE_ONLINE_TUNING",
        "GEMMPIPE_GIVEN_TABLES_ONLY",
        "GEMMPIPE_LOG_TUNED_CONFIG",
        "GEMMPIPE_TUNE_GEMM",
        "GEMMPIPE_DEBUG",
    }
    for path in FILES:
        for name in re.findall(r"\bGEMMPIPE_[A-Z_]+", path.read_text()):
            assert name in known, f"{path}: {name}"


def test_families_are_imported_through_the_package_alone() -> None:
    assert (PACKAGE / "kernels").is_symlink() or not (shipped("conf").parent / "kernels").exists()
    assert not (PACKAGE / "kernels" / "__init__.py").exists()
