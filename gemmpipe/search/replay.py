"""search=replay: another search, answered from recorded spaces instead of a GPU."""

from dataclasses import dataclass, replace

from gemmpipe.errors import UserError, at_least
from gemmpipe.files.csvfile import named_files
from gemmpipe.search import Hunt, Search, Subject
from gemmpipe.search.recording import Recording, read
from gemmpipe.search.simulating import Terms


@dataclass(frozen=True, kw_only=True)
class Replay(Search):
    """Runs the search `of` on each of the `recorded` spaces with `seeds` seeds; `gemmpipe replay` carries it out."""

    of: Search
    recorded: tuple[str, ...]
    seeds: int
    slots: int
    rounds: int
    warm: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, seeds=self.seeds, slots=self.slots, rounds=self.rounds)
        if self.journals or self.of.journals:
            raise ValueError("journals given, expected none: search.warm=true tells what earlier runs would have")

    def start(self, subject: Subject) -> Hunt:
        raise UserError("search=replay: answers from a record, without a device: gemmpipe replay search.recorded=[...]")

    @property
    def limited(self) -> Search:
        """The search that is tried, within its own budget or else this one; in recorded seconds."""
        of = self.of
        return replace(
            of,
            budget_s=self.budget_s if of.budget_s is None else of.budget_s,
            budget_trials=self.budget_trials if of.budget_trials is None else of.budget_trials,
        )

    def recordings(self, chosen: str = "") -> list[Recording]:
        """The recorded spaces, of shipped families or of the `chosen` one. Raises UserError for what is none."""
        if not self.recorded:
            raise UserError("search.recorded: [] given, expected files such as tests/data/recorded/h200_a8w8.jsonl.xz")
        return [read(path, chosen) for path in named_files("search.recorded", self.recorded, "a recorded space")]

    def terms(self, keep: int) -> Terms:
        """How it is replayed, with so many finalists."""
        return Terms(keep=keep, rounds=self.rounds, slots=self.slots)
