"""gemmpipe: from a model and a kernel to tuned artifacts that inference engines load."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmpipe.runtime.patching import patch as patch

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`gemmpipe.patch`, loaded when first used: importing the package loads no torch."""
    if name != "patch":
        raise AttributeError(f"module 'gemmpipe' has no attribute '{name}'")
    from importlib import import_module

    return import_module("gemmpipe.runtime.patching").patch
