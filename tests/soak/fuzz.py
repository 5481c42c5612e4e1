"""Feeds mutated files to every reader until the time is up, and writes what became of them as a Markdown table.

python tests/soak/fuzz.py --minutes 5 [--only READER] [--seed N] [--out FILE.md]

Allowed: a file is accepted, or refused by one UserError in one bounded line. Anything else is printed, its file is
kept, and the exit code is 1: another exception, over 10 seconds, over 4 GB of memory. One process a reader, one reader
after the other; an input depends on the seed, the reader and its number alone.
"""

import argparse
import multiprocessing
import queue
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "soak")]

from fuzz_readers import READERS, Reader  # noqa: E402 (found beside this script)

from gemmpipe.core.errors import UserError  # noqa: E402

HANG_S = 10
MEMORY_BYTES = 4 << 30
LONGEST = 500
"""Characters of a message, without the path of the file."""


class Hang(BaseException):
    """An input took too long; no reader catches it."""


@dataclass
class Outcome:
    """The results of one reader's inputs."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    longest_s: float = 0.0
    failures: list[str] = field(default_factory=list)


def outcome_of(reader: Reader, path: Path) -> str:
    """`accepted`, `refused`, or what went wrong with the file at `path`."""
    try:
        reader.read(path)
    except UserError as error:
        printed = str(error)
        if "\n" in printed.replace(str(path), ""):
            return "a message of several lines"
        if len(printed.replace(str(path), "")) > LONGEST:
            return f"a message of {len(printed)} characters: {printed[:200]}"
        return "refused"
    except Hang:
        return f"over {HANG_S} s"
    except Exception as error:  # noqa: BLE001 - that there is any is the finding
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "accepted"


def place_of(reader: Reader, folder: Path) -> Path:
    """Where a reader's file goes."""
    path = folder / reader.file
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def fuzz(reader: Reader, seed: int, until: float, most: int, folder: Path) -> Outcome:
    """Feed inputs to one reader until a moment of the monotonic clock, at most so many."""
    found, begun = Outcome(), time.monotonic()
    path, number = place_of(reader, folder), 0
    while number < most and time.monotonic() < until:
        raw = reader.input(random.Random(f"{seed} {reader.name} {number}"))
        path.write_bytes(raw)
        started = time.monotonic()
        word = outcome_of(reader, path)
        found.longest_s = max(found.longest_s, time.monotonic() - started)
        if word not in ("accepted", "refused"):
            kept = folder.with_name(f"{folder.name}-{number}-{path.name}"[:200])
            kept.write_bytes(raw)
            found.failures.append(f"input {number}: {word}")
            word = "forbidden"
        found.counts[word] += 1
        number += 1
    found.seconds = time.monotonic() - begun
    return found


def _apart(name: str, seed: int, seconds: float, folder: Path, results: "multiprocessing.Queue[Outcome]") -> None:
    """In a process of its own: with an end to its memory and to each input's time."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise Hang

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    reader = next(each for each in READERS if each.name == name)
    act = reader.read

    def timed(path: Path) -> object:
        signal.alarm(HANG_S)
        try:
            return act(path)
        finally:
            signal.alarm(0)

    signal.signal(signal.SIGALRM, hang)
    object.__setattr__(reader, "read", timed)
    results.put(fuzz(reader, seed, time.monotonic() + seconds, sys.maxsize, folder))


def _outcome(process: multiprocessing.process.BaseProcess, results: "multiprocessing.Queue[Outcome]") -> Outcome:
    """The last message of a reader's process, or that it was killed."""
    while True:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if not process.is_alive():
                return Outcome(Counter(forbidden=1), failures=["its process was lost"])


def table(outcomes: dict[str, Outcome]) -> str:
    """The table in Markdown."""
    names = ("reader", "inputs", "accepted", "refused", "forbidden", "seconds", "slowest")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for name, found in outcomes.items():
        counts = [found.counts.total(), *(found.counts[word] for word in ("accepted", "refused", "forbidden"))]
        numbers = " | ".join(f"{count:,}" for count in counts)
        lines.append(f"| {name} | {numbers} | {found.seconds:.0f} | {found.longest_s * 1e3:.0f} ms |")
    return "\n".join(lines)


def main() -> int:
    """Fuzz and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    readers = [reader for reader in READERS if given.only in (None, reader.name)]
    outcomes: dict[str, Outcome] = {}
    for reader in readers:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        results: multiprocessing.Queue[Outcome] = multiprocessing.Queue()
        arguments = (reader.name, given.seed, given.minutes * 60 / len(readers), folder, results)
        process = multiprocessing.get_context("fork").Process(target=_apart, args=arguments)
        process.start()
        outcomes[reader.name] = _outcome(process, results)
        for failure in outcomes[reader.name].failures[:10]:
            print(f"FORBIDDEN: {reader.name}, seed {given.seed}, {folder}*: {failure}", flush=True)
    total = sum(found.counts.total() for found in outcomes.values())
    failed = sum(found.counts["forbidden"] for found in outcomes.values())
    printed = f"{total:,} inputs of {len(outcomes)} readers, {failed} forbidden outcomes; seed {given.seed}."
    printed += f"\n\n{table(outcomes)}"
    print(printed)
    if given.out:
        given.out.write_text(f"{printed}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
