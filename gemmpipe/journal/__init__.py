"""The journal trials.jsonl: the append-only record of a run, from which all other outputs are derived."""

from gemmpipe.journal.reading import Record, read
from gemmpipe.journal.writer import NAME, Journal

__all__ = ["NAME", "Journal", "Record", "read"]
