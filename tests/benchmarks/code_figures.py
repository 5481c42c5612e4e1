"""Figures of the code in checkouts: python tests/benchmarks/code_figures.py [CHECKOUT]...

Files, lines and folders of `gemmpipe/` and `kernels/`, lines of files and functions, the share of functions with a
docstring, the longest functions.
"""

import ast
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path


def sources(root: Path) -> list[Path]:
    """Python files; `gemmpipe/kernels` is a link to `kernels`."""
    found = (path for part in ("gemmpipe", "kernels") for path in (root / part).rglob("*.py"))
    return sorted(path for path in found if not path.is_relative_to(root / "gemmpipe" / "kernels"))


def spread(values: Sequence[int]) -> str:
    """Median, 90th percentile and maximum."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):g} / {ordered[int(len(ordered) * 0.9)]} / {ordered[-1]}"


def report(root: Path) -> None:
    """Print the figures of a checkout."""
    files, functions, documented = {path: path.read_text() for path in sources(root)}, [], 0
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                functions.append((lines, f"{path.relative_to(root)}:{node.name}"))
                documented += ast.get_docstring(node) is not None
    lengths = [len(text.splitlines()) for text in files.values()]
    loose = sum(path.parent == root / "gemmpipe" for path in files)
    print(root)
    print(f"  {len(files)} files, {sum(lengths):,} lines, {len({path.parent for path in files})} folders")
    print(f"  {1000 * len(files) / sum(lengths):.1f} files per 1,000 lines, {loose} modules in gemmpipe/ itself")
    print(f"  lines of a file {spread(lengths)}; below 80: {sum(n < 80 for n in lengths)}")
    print(f"  lines of {len(functions):,} functions {spread([n for n, _ in functions])}")
    print(f"  functions with a docstring: {100 * documented / len(functions):.0f} %")
    print("  longest:", *(f"{name} {n}" for n, name in sorted(functions, reverse=True)[:4]))


if __name__ == "__main__":
    for given in sys.argv[1:] or ["."]:
        report(Path(given).resolve())
