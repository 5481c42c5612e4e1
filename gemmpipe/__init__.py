"""gemmpipe: from a model and a kernel to tuned artifacts that inference engines load."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmpipe.core.device import get_arch as get_arch
    from gemmpipe.runtime.patch import patch as patch

__version__ = "0.1.0"
_PLACES = {"patch": "gemmpipe.runtime.patch", "get_arch": "gemmpipe.core.device"}


def __getattr__(name: str) -> object:
    """`gemmpipe.patch` and `gemmpipe.get_arch`, loaded when first used: importing the package loads no torch."""
    if name not in _PLACES:
        raise AttributeError(f"module 'gemmpipe' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
