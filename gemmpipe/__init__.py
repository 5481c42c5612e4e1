"""gemmpipe: tunes the matrix products of a model and writes artifacts that inference engines load."""

from typing import TYPE_CHECKING

from gemmpipe.core.renamed import serve_old_names

if TYPE_CHECKING:
    from gemmpipe.api import RunResult as RunResult
    from gemmpipe.api import load as load
    from gemmpipe.api import run as run
    from gemmpipe.core.device import get_arch as get_arch
    from gemmpipe.core.errors import EnvironmentProblem as EnvironmentProblem
    from gemmpipe.core.errors import GemmpipeError as GemmpipeError
    from gemmpipe.core.errors import UserError as UserError
    from gemmpipe.runtime.patch import patch as patch

__version__ = "0.2.0.dev0"
__all__ = ["EnvironmentProblem", "GemmpipeError", "RunResult", "UserError", "get_arch", "load", "patch", "run"]
_MODULES = {
    "EnvironmentProblem": "gemmpipe.core.errors",
    "GemmpipeError": "gemmpipe.core.errors",
    "RunResult": "gemmpipe.api",
    "UserError": "gemmpipe.core.errors",
    "get_arch": "gemmpipe.core.device",
    "load": "gemmpipe.api",
    "patch": "gemmpipe.runtime.patch",
    "run": "gemmpipe.api",
}

serve_old_names()


def __getattr__(name: str) -> object:
    """The names of `__all__`, each imported on first use, so that importing the package does not load torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'gemmpipe' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
