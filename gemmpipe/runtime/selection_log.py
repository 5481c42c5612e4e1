"""Log of the run time's selections: each step once per key if enabled, warnings, one summary line at exit."""

import atexit
import logging
from collections import Counter
from dataclasses import dataclass, field

from gemmpipe.core.events import counted
from gemmpipe.family.environment import LOG_SELECTION, is_enabled

_LOG = logging.getLogger("gemmpipe.runtime")


@dataclass(kw_only=True)
class UntunedKey:
    """A key without a row, and the number of its calls."""

    family: str
    key: str
    calls: int = 0


@dataclass(kw_only=True)
class SelectionLog:
    """Warnings once each, steps when `GEMMPIPE_LOG_SELECTION` is set, untuned keys for the line at exit."""

    steps: dict[str, str] = field(default_factory=dict)
    """Key -> the step of its current selection."""
    untuned: dict[str, UntunedKey] = field(default_factory=dict)
    padded: Counter[str] = field(default_factory=Counter)
    _warned: set[str] = field(default_factory=set)
    _logged: set[str] = field(default_factory=set)
    _seen: set[object] = field(default_factory=set)
    _registered: bool = False

    def log_step(self, text: str) -> None:
        """One step of a look-up; shown only if enabled."""
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
        """A warning, once per subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            _LOG.warning("gemmpipe: %s", text)

    def is_first(self, value: object) -> bool:
        """True at the first call with this value: saves formatting a message in each call."""
        new = value not in self._seen
        self._seen.add(value)
        return new

    def count_miss(self, family: str, key: str) -> UntunedKey:
        """Count a key without a row; the caller counts its calls."""
        self._report_at_exit()
        return self.untuned.setdefault(key, UntunedKey(family=family, key=key))

    def record_step(self, family: str, key: str, step: str) -> None:
        """Record a key's step: `exact`, `padded` or `fallback`."""
        if step == "padded" and self.steps.get(key) != step:
            self.count_padded(family)
        self.steps[key] = step

    def count_padded(self, family: str) -> None:
        """Count a key with a row of a padded M."""
        self._report_at_exit()
        self.padded[family] += 1

    def summary(self) -> str:
        """One line: untuned keys and their calls by family, and the most frequent one; empty if all are tuned."""
        keys = Counter(found.family for found in self.untuned.values())
        parts = []
        for family in sorted({*keys, *self.padded}):
            untuned = [found for found in self.untuned.values() if found.family == family]
            text = f"{family}: {len(untuned)} untuned ({counted(sum(found.calls for found in untuned), 'call')}"
            if untuned:
                text += f", most: {max(untuned, key=lambda found: found.calls).key.removeprefix(family).strip()}"
            padded = f", {self.padded[family]} with a row of a padded M" if self.padded[family] else ""
            parts.append(f"{text}){padded}")
        return "; ".join(parts)

    def clear(self) -> None:
        """Clear all records and counts."""
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
    """The step of each key of this process so far, by the key's text: `exact`, `padded` or `fallback`."""
    return dict(LOG.steps)
