"""Imports point down, modules and functions stay small, names are unique, and importing loads nothing heavy.

The one line of layers is in CONTRIBUTING.md.
"""

import ast
import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from gemmpipe.core.paths import PACKAGE, shipped
from gemmpipe.core.renamed import renamed_modules, renamed_names

ROOT = PACKAGE.parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
if not any("kernels" in path.parts for path in FILES):  # Python 3.13 follows no links
    FILES += sorted(path for path in (PACKAGE / "kernels").glob("*/*.py"))
MACHINERY = [path for path in FILES if path.relative_to(PACKAGE).parts[0] != "kernels"]
FAMILIES = sorted(path.parent.name for path in (PACKAGE / "kernels").glob("*/__init__.py"))
(_LINE,) = re.findall(r"^ *(core <[\s\w<]+ cli)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
LAYERS = [word.strip() for word in _LINE.split("<")]
"""From the lowest: a package imports from itself and from packages to its left."""
FACADE = {
    "__init__": "the public names, each loaded when first used",
    "__main__": "python -m gemmpipe",
    "api": "gemmpipe.run and gemmpipe.load: the command line from Python",
    "capture": "python -m gemmpipe.capture",
    "ext": "re-exports for users' families, backends, searches and stages",
    "online": "python -m gemmpipe.online: starts command lines in processes of their own",
}
"""Modules that belong to no package, and may import any."""
UPWARD = {("gemmpipe.runtime.online", "gemmpipe.online"): "the run time starts the tuner that it names"}
MIN_LINES, MAX_LINES, MAX_FUNCTION = 80, 500, 50
SHORT = {
    "launch/_empty.py": "device code: imports triton, its host side does not",
    "backends/own.py": "the backend of families' own kernels",
    "backends/quack.py": "one library",
    "backends/packages.py": "one form of the reasons of all backends",
    "bench/preloaded.py": "what the forkserver imports; any import more is paid by each run",
    "capture.py": "an entry point",
    "cli/browser.py": "one rule of demo, report and runs",
    "cli/errors.py": "loaded without Hydra",
    "core/shell.py": "read by sources and by the command line",
    "engines/packages.py": "names and folders, read by formats and by the command line",
    "family/dtypes.py": "names of dtypes; imported everywhere, so without torch",
    "family/layouts.py": "layouts of weights",
    "fmoe/_overlapped_kernel.py": "launches of another module's kernels, whose source tables are valid for",
    "formats/findings.py": "shared by two readers of engines' files",
    "linear_fp8_blockscale/_streamed_kernel.py": "the entry of a kernel of templates, by which its rows are named",
    "listeners/figures.py": "shared by trackers",
    "listeners/json_stream.py": "one listener",
    "pipeline/listening.py": "between the run and its listeners",
    "runtime/capture/routing.py": "loads torch, which the recorder of products does not",
    "plugins/operators.py": "operators alone: they load torch's compiler",
    "pipeline/named_backends.py": "what the command line, the runner and the summary ask about backend=",
    "pipeline/steps.py": "what a listener needs to estimate the end of a run",
    "runtime/copy_log.py": "one log",
    "search/forest.py": "needs scikit-learn, the others do not",
    "stages/dispatch.py": "one stage",
    "stages/screen/not_timed.py": "what screen prints of the backends that were named",
    "stages/memory_options.py": "the rows of a table; the report presents them",
    "stages/workload.py": "imported by the report without stages",
    "tables/file_names.py": "imported by sources without the tables",
    "templates/hopper/gluon_compat.py": "device code of several versions of Triton",
    "__main__.py": "an entry point",
    "cli/machine.py": "facts of the machine for doctor",
    "pipeline/problem_list.py": "what capture prints",
    "templates/quantise_kernel.py": "device code",
    "cli/progress.py": "the listener; what it shows is in cli/display.py",
    "a16w16_atomic/_triton.py": "host code of one kernel",
    "a4w4_blockscale/_kernel.py": "device code",
}
"""Modules of fewer than 80 lines, packages' `__init__` and families' aside."""
LONG_FUNCTIONS = {
    "fmoe/_engine_kernel.py:engine_experts": (88, "its pointers and loads as functions compile to other instructions"),
}
"""Functions of more than 50 lines: their lines, and why they are not divided."""


def _dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("gemmpipe", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {_dotted(path): path for path in FILES}


def _room(module: str) -> str:
    """The package directly below gemmpipe, or the module there."""
    return module.split(".")[1] if "." in module else "__init__"


def _for_type_checkers(path: Path, tree: ast.AST) -> set[ast.AST]:
    if "TYPE_CHECKING" not in path.read_text():
        return set()
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {inner for guard in guards for child in guard.body for inner in ast.walk(child)}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path, *, at_import: bool = False) -> Iterator[str]:
    """Modules that a file imports, local imports included; `at_import`: only those at the top of the file."""
    tree = _tree(path)
    skipped = _for_type_checkers(path, tree)
    inside = {n for f in ast.walk(tree) if isinstance(f, _FUNCTIONS) for n in ast.walk(f)} if at_import else set()
    for node in ast.walk(tree):
        if node in skipped or node in inside:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def test_every_package_has_a_layer() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - {"conf", "pipelines", "tuned"} == set(LAYERS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(FACADE)


def test_imports_point_down() -> None:
    for path in FILES:
        _imports_point_down(path)


def _imports_point_down(path: Path) -> None:
    module = _dotted(path)
    own = _room(module)
    for name in _imports(path):
        assert name.split(".")[0] != "kernels", f"{path}: import it as gemmpipe.kernels"
        if name.split(".")[0] in {"hydra", "omegaconf"}:
            assert own in {"cli", "pipeline", "api"}, f"{path} imports {name}"
        if name.split(".")[0] == "pandas":
            assert own not in {"runtime", "bench", "kernels", "backends", "search", "core"}, path
        if name not in MODULES or name == "gemmpipe" or own in FACADE or (module, name) in UPWARD:
            continue
        room = _room(name)
        assert room in LAYERS, f"{path} imports {name}, which belongs to no layer"
        assert LAYERS.index(room) <= LAYERS.index(own), f"{path} imports {name}, which is above it"


def test_no_module_imports_itself_through_others() -> None:
    """No circles of imports at the top of modules; a module imports the packages that it is in, too."""
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        names = {name for name in _imports(path, at_import=True) if name in MODULES}
        parents = {".".join(name.split(".")[:n]) for name in names for n in range(2, name.count(".") + 1)}
        graph[module] = {n for n in names | (parents & MODULES.keys()) if not f"{module}.".startswith(f"{n}.")}
    seen: dict[str, bool] = {}  # done, or on the way that is followed now

    def follow(module: str, way: tuple[str, ...]) -> None:
        assert seen.get(module, True), f"a circle: {' -> '.join([*way[way.index(module) :], module])}"
        if module in seen:
            return
        seen[module] = False
        for name in sorted(graph[module]):
            follow(name, (*way, module))
        seen[module] = True

    for module in sorted(graph):
        follow(module, ())


def _place(path: Path) -> str:
    return str(path.relative_to(PACKAGE)).removeprefix("kernels/")


def test_modules_have_80_to_500_lines() -> None:
    """An exemption that is no longer needed is to be removed, too."""
    lines = {_place(path): len(path.read_text().splitlines()) for path in FILES}
    short = {name for name, n in lines.items() if n < MIN_LINES and "__init__" not in name}
    assert short - set(SHORT) == set(), "merge it, or give the reason"
    assert {name: lines.get(name, "gone") for name in set(SHORT) - short} == {}, "not short: remove from SHORT"
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}, "divide it"


def test_functions_have_at_most_50_lines() -> None:
    """The exemptions are those that are needed, with their sizes."""
    long = {}
    for path in FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION:
                    long[f"{_place(path)}:{node.name}"] = lines
    assert long == {name: lines for name, (lines, _) in LONG_FUNCTIONS.items()}


def test_public_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in FILES:
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_machinery_names_no_family() -> None:
    """Entry points, readers of others' tables and plug-ins do: they name the families of products."""
    for path in MACHINERY:
        if _room(_dotted(path)) not in {"runtime", "sources", "plugins"}:
            _names_no_family(path)


def _names_no_family(path: Path) -> None:
    nodes = [node for top in _tree(path).body if not isinstance(top, ast.Expr) for node in ast.walk(top)]
    strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    docstrings = {ast.get_docstring(n, clean=False) for n in nodes if isinstance(n, _DOCUMENTED)}
    for family in FAMILIES:
        for value in strings:
            assert value in docstrings or not re.search(rf"\b{family}\b", value), f"{path}: '{value}'"


_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def _loaded(code: str, names: str) -> set[str]:
    """Which of these modules are loaded after running the code in a fresh process."""
    script = f"{code}\nimport sys\nprint(*[m for m in {names.split()!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = "torch triton pandas hydra omegaconf numpy yaml tqdm json"


@pytest.mark.e2e
def test_importing_the_package_is_lazy() -> None:
    assert _loaded("import gemmpipe", HEAVY) == set()
    assert (
        _loaded("import gemmpipe\ngemmpipe.UserError, gemmpipe.run, gemmpipe.RunResult", "torch pandas hydra") == set()
    )
    assert _loaded("import gemmpipe.ext", "torch triton pandas hydra numpy") == set()
    assert _loaded("import gemmpipe.cli.main", "torch triton pandas hydra numpy") == set()


@pytest.mark.e2e
def test_listing_candidates_needs_no_triton() -> None:
    names = " ".join(f"load_family({family!r})," for family in FAMILIES)
    assert _loaded(f"from gemmpipe.family import load_family\n{names}", "triton pandas hydra") == set()


@pytest.mark.e2e
def test_a_worker_needs_neither_pandas_nor_hydra() -> None:
    assert _loaded("import gemmpipe.bench.worker", "pandas hydra omegaconf") == set()


def test_importing_a_module_touches_no_device() -> None:
    """At import, nothing is called that asks torch about devices."""
    for path in FILES:
        for node in _tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                continue
            assert "torch.cuda." not in ast.unparse(node), f"{path}: {ast.unparse(node)}"


def test_the_environment_belongs_to_a_few_variables() -> None:
    known = {
        "GEMMPIPE_CONFIG_",
        "GEMMPIPE_CAPTURE",
        "GEMMPIPE_LOG_SELECTION",
        "GEMMPIPE_ONLINE_TUNING",
        "GEMMPIPE_GIVEN_TABLES_ONLY",
        "GEMMPIPE_LOG_TUNED_CONFIG",
        "GEMMPIPE_TUNE_GEMM",
        "GEMMPIPE_HIP_ONLINE_TUNING",
        "GEMMPIPE_DEBUG",
        "GEMMPIPE_VLLM",
        "GEMMPIPE_SGLANG",
    }
    for path in FILES:
        for name in re.findall(r"\bGEMMPIPE_[A-Z_]+", path.read_text()):
            assert name in known, f"{path}: {name}"


def test_families_are_imported_through_the_package_alone() -> None:
    assert (PACKAGE / "kernels").is_symlink() or not (shipped("conf").parent / "kernels").exists()
    assert not (PACKAGE / "kernels" / "__init__.py").exists()


def test_renamed_names_exist() -> None:
    """Targets of old paths; each is resolved for real in tests/test_renamed.py where it is cheap."""
    for old, new in renamed_modules().items():
        assert new in MODULES, old
        assert importlib.util.find_spec(new) is not None
        assert old not in MODULES, f"{old} is there again"
    defined = {module: _defined(path) for module, path in MODULES.items()}
    for module, names in renamed_names().items():
        for old, path in names.items():
            place, _, name = path.rpartition(".")
            assert name in defined.get(place, ()), f"{module}.{old} -> {path}"
            assert old not in defined.get(module, ()), f"{module}.{old} is there again"


def _defined(path: Path) -> set[str]:
    names: set[str] = set()
    for node in _tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
            names |= {alias.asname or alias.name for alias in node.names}
    return names
