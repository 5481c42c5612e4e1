"""`python -m gemmpipe.capture script.py args...` writes a program's matrix products to a CSV (see gemmpipe.runtime)."""

import sys
from importlib import import_module

from gemmpipe.core.errors import GemmpipeError

if __name__ == "__main__":
    try:
        import_module("gemmpipe.runtime.capture.__main__").main(sys.argv[1:])  # by name: a higher layer
    except GemmpipeError as error:
        print(f"gemmpipe: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
