"""`python -m gemmpipe.capture script.py args...` writes the program's matrix products to a CSV; see the run time."""

import sys
from importlib import import_module

from gemmpipe.core.errors import GemmpipeError

if __name__ == "__main__":
    try:
        import_module("gemmpipe.runtime.capture.__main__").main(sys.argv[1:])  # by name: it lies above this layer
    except GemmpipeError as error:
        print(f"gemmpipe: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
