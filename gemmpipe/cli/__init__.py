"""The command line, the only part that prints: its entry point, and output streams that can lose their readers.

A closed pipe or a lost terminal silences a run; it does not end it.
"""

import atexit
import errno
import io
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Never

STDOUT = "standard output"
_WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def entry() -> Never:
    """Run the command line and exit with its code."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # false where a shell ignores SIGINT
    if interruptible:  # in the middle of an import the handler would print a traceback of the import
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gemmpipe.cli.main import main
    from gemmpipe.core.errors import EXIT_INTERRUPTED
    from gemmpipe.core.signals import startup_interrupt

    if interruptible:
        signal.signal(signal.SIGINT, startup_interrupt.on_signal)
    replace_closed_streams()
    # Before and after a run handles these itself, they interrupt as SIGINT does; nohup ignores SIGHUP: keep that.
    ending = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    for number in ending:
        signal.signal(number, startup_interrupt.on_signal)
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # a second one, while the first was being reported
        code = EXIT_INTERRUPTED
    startup_interrupt.cancel_alarm()
    # The interpreter drops its handlers before it has ended, and a death by the signal would replace the exit code.
    for number in (signal.SIGINT, *ending):
        signal.signal(number, signal.SIG_IGN)
    _exit_now(code)


def _exit_now(code: int) -> Never:
    """Exit as `sys.exit` does, but without taking apart every module and object: with torch that takes 1 to 4 s.

    Besides, Python ends itself by SIGINT if a KeyboardInterrupt ever left an `exec`, although it was caught later.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    silence_lost_streams()
    os._exit(code)


def replace_closed_streams() -> None:
    """Open /dev/null for each closed standard stream (`>&-`): else the next open file, the journal too, is stdout."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 (as long as the process)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def escape_unencodable() -> None:
    """Escape characters that a stream's encoding lacks: a folder's name in a line must not end a run.

    Also keeps `logging`, which Hydra uses for `--info`, from printing a traceback per line that cannot be written.
    """
    logging.raiseExceptions = False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def tolerating_closed_pipes(*, but_not_full: bool = False) -> Iterator[None]:
    """Drop output of the block that cannot be written, and all later output of a stream that lost its reader.

    `but_not_full`: raises OSError if the stream has a reader but cannot be written, such as a full disk.
    """
    try:
        yield
    except OSError as error:
        if but_not_full and error.errno in _WRITE_ERRNOS:
            raise
        silence_lost_streams()


@contextmanager
def announced(text: str) -> Iterator[None]:
    """Print what the block does on stderr, as it prints nothing for a second or more; a terminal erases it after.

    On stderr, because stdout has the result alone, which programs read.
    """
    stream = sys.stderr
    passes = stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
    shown = text
    if passes and len(text) >= (width := shutil.get_terminal_size().columns):
        shown = f"{text[: max(1, width - 4)]}..."  # a folded line cannot be erased
    with tolerating_closed_pipes():
        print(shown, end="" if passes else "\n", file=stream, flush=True)
    try:
        yield
    finally:
        if passes:
            with tolerating_closed_pipes():
                print("\r\x1b[K", end="", file=stream, flush=True)


@contextmanager
def naming_write_errors(what: str) -> Iterator[None]:
    """Raise write errors of the block that name no file (a full disk) as OSError of the file `what`.

    Flushes stdout within the block: at the interpreter's end the error could not be reported.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRNOS:
            raise
        raise OSError(error.errno, error.strerror, what) from error


def silence_lost_streams() -> None:
    """Redirect streams without readers to /dev/null."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # The buffered rest would raise again, at the latest when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
