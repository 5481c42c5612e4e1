"""The command line: the only place that prints."""


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
    from gemmpipe.cli.streams import silence_the_lost, stand_in_for_the_closed
    from gemmpipe.starting import start

    if heard:
        signal.signal(signal.SIGINT, start.hear)
    stand_in_for_the_closed()
    # Before a run listens to these and after it, they interrupt as SIGINT does; nohup: the terminal may go.
    ending = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    for number in ending:
        signal.signal(number, start.hear)
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # once more, while the first was being told
        code = 130
    start.settle()
    # The interpreter gives a handler up before it has ended, and a death by the signal would not be the run's own code.
    for number in (signal.SIGINT, *ending):
        signal.signal(number, signal.SIG_IGN)
    if code == 130:
        # Python ends itself by SIGINT where a KeyboardInterrupt once left an `exec`, although it was caught later.
        atexit._run_exitfuncs()
        silence_the_lost()
        os._exit(code)
    sys.exit(code)
