"""trials.jsonl: the append-only truth of a run, written and read back; everything else is derived from it."""

from gemmpipe.journal.reading import Record, read
from gemmpipe.journal.writer import NAME, Journal

__all__ = ["NAME", "Journal", "Record", "read"]
