"""What the run time says about its choices: each step once a key when asked, one line at exit always."""

import atexit
import logging
from collections import Counter
from dataclasses import dataclass, field

from gemmpipe.core.events import counted
from gemmpipe.family.environment import LOG_SELECTION, is_enabled

_LOG = logging.getLogger("gemmpipe.runtime")


@dataclass(kw_only=True)
class UntunedKey:
    """A key that no row answered, and how often it was called."""

    family: str
    key: str
    calls: int = 0


@dataclass(kw_only=True)
class SelectionLog:
    """Warnings once each, steps when `GEMMPIPE_LOG_SELECTION` is set, untuned keys for the line at exit."""

    steps: dict[str, str] = field(default_factory=dict)
    """By key: the step that answered it at last."""
    untuned: dict[str, UntunedKey] = field(default_factory=dict)
    padded: Counter[str] = field(default_factory=Counter)
    _warned: set[str] = field(default_factory=set)
    _logged: set[str] = field(default_factory=set)
    _seen: set[object] = field(default_factory=set)
    _registered: bool = False

    def log_step(self, text: str) -> None:
        """One step of a look-up; shown only when asked for."""
        if not is_enabled(LOG_SELECTION):
            return
        if text in self._logged:
            return
        self._logged.add(text)
        if not _LOG.hasHandlers():
            _LOG.addHandler(logging.StreamHandler())
        if not _LOG.isEnabledFor(logging.INFO):
            _LOG.setLevel(logging.INFO)
        _LOG.info("gemmpipe: %s", text)

    def warn(self, subject: str, text: str) -> None:
        """A warning, once a subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            _LOG.warning("gemmpipe: %s", text)

    def is_first(self, what: object) -> bool:
        """Whether this is seen for the first time: what is told of every call need not be put into words each time."""
        new = what not in self._seen
        self._seen.add(what)
        return new

    def count_miss(self, family: str, key: str) -> UntunedKey:
        """Count a key that no row answered; its calls are counted by whoever makes them."""
        self._report_at_exit()
        return self.untuned.setdefault(key, UntunedKey(family=family, key=key))

    def record_step(self, family: str, key: str, step: str) -> None:
        """Remember how a key was answered: `exact`, `padded` or `fallback`."""
        if step == "padded" and self.steps.get(key) != step:
            self.count_padded(family)
        self.steps[key] = step

    def count_padded(self, family: str) -> None:
        """Count a key that a padded row answered."""
        self._report_at_exit()
        self.padded[family] += 1

    def summary(self) -> str:
        """One line: untuned keys and their calls by family, the most called one; empty when all were tuned."""
        keys = Counter(found.family for found in self.untuned.values())
        parts = []
        for family in sorted({*keys, *self.padded}):
            mine = [found for found in self.untuned.values() if found.family == family]
            words = f"{family}: {len(mine)} untuned ({counted(sum(found.calls for found in mine), 'call')}"
            if mine:
                words += f", most: {max(mine, key=lambda found: found.calls).key.removeprefix(family).strip()}"
            padded = f", {self.padded[family]} answered by a padded M" if self.padded[family] else ""
            parts.append(f"{words}){padded}")
        return "; ".join(parts)

    def clear(self) -> None:
        """Forget what was said and counted."""
        for held in (self.steps, self.untuned, self.padded, self._warned, self._logged, self._seen):
            held.clear()

    def _report_at_exit(self) -> None:
        if not self._registered:
            self._registered = True
            atexit.register(self._report)

    def _report(self) -> None:
        if any(found.calls for found in self.untuned.values()):
            _LOG.warning("gemmpipe: keys without a row of their own: %s", self.summary())


LOG = SelectionLog()


def dispatch_report() -> dict[str, str]:
    """How each key of this process was answered so far, by its words: `exact`, `padded` or `fallback`."""
    return dict(LOG.steps)
