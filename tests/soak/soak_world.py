"""Faults of what lies around a run: its disk, its files, its clock, its reader."""

import json
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from soak_faults import MS, Act, ended, ended_by_a_signal, go_on, in_session, problems, without_neighbours
from soak_runs import Site, artifacts_are_whole, kill_after, nothing_is_lost, nothing_is_repeated, table_is_right


@contextmanager
def small_disk(path: Path, kilobytes: int) -> Iterator[None]:
    """A file system of this size at `path`, while it is needed."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "soak", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def may_mount() -> bool:
    """True if this user may mount file systems."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder) / "disk", 16):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def full_disk(site: Site, chance: random.Random) -> int:
    """A disk that is full after some kilobytes: code 3 in one line; with room again the run goes on."""
    outputs = site.folder / "outputs"
    arguments = (problems(), f"space.PACE_MS=[{','.join(str(i / 100) for i in range(40))}]", "search=exhaustive")
    with small_disk(outputs, chance.randrange(16, 72, 4)):
        error = ended(site.start(*arguments, "batch=2"), 3)
        assert len(error.splitlines()) == 1, error[-600:]
        artifacts_are_whole(site)
        subprocess.run(["mount", "-o", "remount,size=64m", outputs], check=True)
        if site.rows("problem"):
            go_on(site)
    return 1


def largest_file(site: Site, chance: random.Random) -> int:
    """A file that may grow no more (a quota): the same."""
    arguments = (problems(), f"space.PACE_MS=[{','.join(str(i / 100) for i in range(60))}]", "search=exhaustive")
    error = ended(site.start(*arguments, most_bytes=chance.randrange(8_000, 60_000)), 3)
    assert len(error.splitlines()) == 1, error[-600:]
    artifacts_are_whole(site)
    if site.rows("problem"):
        go_on(site)
    return 1


def read_only_output(site: Site, chance: random.Random) -> int:
    """The output folder becomes read-only before or while a run works: code 3 in one line, nothing half-written."""
    tuned = site.table.parent
    late = chance.random() < 0.7
    with small_disk(tuned, 4096):
        if not late:
            subprocess.run(["mount", "-o", "remount,ro", tuned], check=True)
        started = site.start(problems(), "space.PACE_MS=[0,5,6]", "search=exhaustive", "batch=2")
        if late:
            site.wait_for(started, "done", chance.randrange(1, 4))
            subprocess.run(["mount", "-o", "remount,ro", tuned], check=False)  # busy for the moment of a write
        error = ended(started, 3, *((0,) if late else ()))
        assert len(error.splitlines()) <= 1, error[-600:]
        artifacts_are_whole(site)
        subprocess.run(["mount", "-o", "remount,rw", tuned], check=True)
        if site.rows("problem"):
            go_on(site)
        else:
            assert not late
            ended(site.start(problems(), "space.PACE_MS=[0]"), 0)
            table_is_right(site, MS)
    return 1


def spoilt_journals(spoil: Callable[[bytes, random.Random], bytes]) -> Act:
    """A journal that somebody spoilt: what is whole in it is kept, what is not is done again."""

    def act(site: Site, chance: random.Random) -> int:
        arguments = (problems(), "space.PACE_MS=[0,1,2]", "search=exhaustive")
        ended(site.start(*arguments), 0)
        path = site.journal()
        assert path is not None
        whole = path.read_bytes()
        for _ in range(4):
            path.write_bytes(spoil(whole, chance))
            for left in site.folder.glob("outputs/tuned/*"):
                left.unlink()
            if site.rows("problem") and site.rows("session"):
                go_on(site, run=str(path.parent))
        return 4

    return act


def truncated(whole: bytes, chance: random.Random) -> bytes:
    """Cut anywhere."""
    return whole[: chance.randrange(1, len(whole))]


def garbled(whole: bytes, chance: random.Random) -> bytes:
    """With lines of garbage between the rows."""
    lines = whole.splitlines(keepends=True)
    for _ in range(chance.randrange(1, 8)):
        garbage = chance.choice(
            (
                chance.randbytes(chance.randrange(1, 2000)).replace(b"\n", b" "),
                b'{"row":"trial","stage":"screen"}',
                b'{"row":"done"}',
                b"[" * 100_000,
                b'{"row":"trial","candidate":["a"]}',
                b"null",
            )
        )
        lines.insert(chance.randrange(1, len(lines) + 1), garbage + b"\n")
    return b"".join(lines)


def merging_at_once(site: Site, chance: random.Random) -> int:
    """Four runs of one problem each write the same table at the same moment."""
    ms = tuple(chance.sample(range(1, 65), 4))
    for m in ms:
        ended(site.start(problems((m,)), "space.PACE_MS=[0]", f"output=own{m}"), 0)
    folders = sorted(site.folder.glob("outputs/runs/tune/*"))
    for _ in range(3):
        shutil.rmtree(site.table.parent, ignore_errors=True)
        for each in [
            site.start(f"reuse={folder}", "chain=[select,merge]", "output=outputs/tuned") for folder in folders
        ]:
            ended(each, 0)
        artifacts_are_whole(site)
        table_is_right(site, ms)
        for made in site.folder.glob("outputs/runs/tune/*"):
            if made not in folders:
                shutil.rmtree(made)
    return 3


# The world around


_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    static long jump;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, t);
    if (id == CLOCK_REALTIME) {
        if (rand() % 50 == 0) jump = (rand() % 3 - 1) * 86400L * (rand() % 400);
        t->tv_sec += jump;
    }
    return code;
}
"""


def jumping_clock(site: Site, chance: random.Random) -> int:
    """The wall clock jumps by up to 400 days, forward and back, all the time; the run is stopped once and resumed."""
    source, library = site.folder / "clock.c", site.folder / "clock.so"
    source.write_text(_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    preload = {"LD_PRELOAD": str(library)}
    started = site.start(problems(), "space.PACE_MS=[0,5,6]", "search=exhaustive", "batch=2", environment=preload)
    assert in_session(site, started)
    kill_after(chance, started, 2.0, lambda: started.process.send_signal(signal.SIGINT))
    ended_by_a_signal(site, started)
    before = site.rows()
    journal = site.journal()
    assert journal is not None
    ended(site.start(f"resume={journal.parent}", environment=preload), 0)
    nothing_is_lost(before, site.rows())
    nothing_is_repeated(site.rows())
    artifacts_are_whole(site)
    table_is_right(site, MS)
    times = [float(sample) for row in site.rows("trial") for sample in json.loads(json.dumps(row["samples_us"]))]
    assert all(0 < us < 60e6 for us in times), "a time was taken from the wall clock"
    return 2


def lost_stdout(site: Site, chance: random.Random) -> int:
    """The reader of stdout leaves after a line: the run goes on to its end."""
    started = site.start(problems(), "space.PACE_MS=[0,5,6]", "search=exhaustive", "batch=2")
    assert started.process.stdout is not None
    for _ in range(chance.randrange(0, 3)):
        started.process.stdout.readline()
    started.process.stdout.close()
    assert started.process.stderr is not None
    error = without_neighbours(started.process.stderr.read())
    assert started.process.wait(120) == 0, error[-600:]
    assert error == "", error[-600:]
    assert started.gone()
    nothing_is_repeated(site.rows())
    artifacts_are_whole(site)
    table_is_right(site, MS)
    return 1
