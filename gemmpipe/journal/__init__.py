"""The journal trials.jsonl: the append-only record of a run, from which all other outputs are derived."""

from gemmpipe.journal.reading import Entry, Record, read
from gemmpipe.journal.writer import NAME, Journal

__all__ = ["NAME", "Entry", "Journal", "Record", "read"]
