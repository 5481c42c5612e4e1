"""Kernels that the compiler does not survive: looking one up does what its name says."""

import os
import time


def __getattr__(name: str) -> object:
    if name == "compile_hang":
        time.sleep(3600)
    if name == "compile_crash":
        os._exit(3)
    if name == "compile_error":
        raise RuntimeError("ptxas\nfailed")
    raise AttributeError(name)
