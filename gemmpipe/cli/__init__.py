"""The command line: the only place that prints."""


def entry() -> None:
    """Run the command line and exit with its code."""
    import sys

    from gemmpipe.cli.main import main
    from gemmpipe.cli.streams import stand_in_for_the_closed

    stand_in_for_the_closed()
    sys.exit(main(sys.argv[1:]))
