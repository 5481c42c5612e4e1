"""The command line: the only place that prints.

Stdout and stderr when their readers leave: a closed pipe or a lost terminal silences a run, it does not end it.
"""

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def entry() -> None:
    """Run the command line and exit with its code."""
    import atexit
    import os
    import signal
    import sys

    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where a shell has it ignored
    if heard:  # in the middle of an import the handler would print where that was
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gemmpipe.cli.main import main
    from gemmpipe.core.signals import startup_interrupt

    if heard:
        signal.signal(signal.SIGINT, startup_interrupt.on_signal)
    replace_closed_streams()
    # Before a run listens to these and after it, they interrupt as SIGINT does; nohup: the terminal may go.
    ending = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    for number in ending:
        signal.signal(number, startup_interrupt.on_signal)
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # once more, while the first was being told
        code = 130
    startup_interrupt.cancel_alarm()
    # The interpreter gives a handler up before it has ended, and a death by the signal would not be the run's own code.
    for number in (signal.SIGINT, *ending):
        signal.signal(number, signal.SIG_IGN)
    if code == 130:
        # Python ends itself by SIGINT where a KeyboardInterrupt once left an `exec`, although it was caught later.
        atexit._run_exitfuncs()
        silence_lost_streams()
        os._exit(code)
    sys.exit(code)


STDOUT = "standard output"
_WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def replace_closed_streams() -> None:
    """Open nothing in the place of what the caller closed (`>&-`): the next file, the journal too, would be stdout."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 (as long as the process)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def escape_unencodable() -> None:
    """Characters that a stream's encoding lacks are escaped: the name of a folder in a line ends no run.

    Nor does Hydra, which says `--info` by logging, print a traceback for each line that nobody reads.
    """
    logging.raiseExceptions = False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def tolerating_closed_pipes(*, but_not_full: bool = False) -> Iterator[None]:
    """Within the block what cannot be printed is lost; the stream that lost its reader says nothing from then on.

    `but_not_full`: raises OSError where the reader is there, but what was said could not be written.
    """
    try:
        yield
    except OSError as error:
        if but_not_full and error.errno in _WRITE_ERRNOS:
            raise
        silence_lost_streams()


@contextmanager
def naming_write_errors(what: str) -> Iterator[None]:
    """What the system refuses within the block and does not name (a full disk says no file) is told as of `what`.

    What is still buffered is said within it: at the interpreter's end nobody could tell.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRNOS:
            raise
        raise OSError(error.errno, error.strerror, what) from error


def silence_lost_streams() -> None:
    """Send to nowhere what goes to streams without readers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # What is still buffered would raise again, at the latest when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
