"""`python -m gemmpipe` is the command line."""

from gemmpipe.cli import entry

if __name__ == "__main__":
    entry()
