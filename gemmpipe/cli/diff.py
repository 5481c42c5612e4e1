"""`gemmpipe diff A B`: two runs or tables, product by product; with `fail_above` a gate of continuous integration."""

from collections.abc import Mapping

from gemmpipe.cli import STDOUT, naming_write_errors
from gemmpipe.cli.command_line import CommandLine
from gemmpipe.cli.commands import options
from gemmpipe.cli.run_list import is_true, whole_number
from gemmpipe.core.errors import UserError
from gemmpipe.core.events import counted
from gemmpipe.core.files import is_number
from gemmpipe.core.text_table import terminal_width
from gemmpipe.report.choices import read_sides
from gemmpipe.report.diff import Difference, DiffRules, compare
from gemmpipe.report.diff_text import as_json, markdown_lines, text_lines

HELP = """gemmpipe diff A B [fail_above=PERCENT] [markdown=true] [json=true] ...

Compares B (after) with A (before), product by product: gemmpipe diff last~1 last. A side is the folder of a run, a
tuned table (CSV), `last` (the newest run with choices), `last~1` (the run before it) or `shipped` (the shipped table of
the kernel of the other side).

Each time has an interval: its noise against the runner-up (column noise_pct), or half the interval of its ratio to the
baseline (ratio_low, ratio_high), whichever is larger. Verdicts: faster or slower if the intervals of both sides do not
meet, same if the change is within same_within percent for certain, else unsure. Rows of different devices or timing
methods (column policy) are counted and not compared, unless across=true.

  fail_above=2     exit code 1 if a product is slower by more than 2 percent for certain; 2 if no product is compared
  same_within=1    percent: changes within it are the same
  default_noise=3  percent: the noise of rows without an interval; of rows of a CPU 30 if not given
  across=true      compare rows of different devices or timing methods too
  n=20             the number of changed products to list; 0 for all
  markdown=true    Markdown, for the summary of a CI job
  json=true        all products and figures as JSON
"""
_DEFAULTS: Mapping[str, str] = {
    "fail_above": "",
    "same_within": "1",
    "default_noise": "",
    "across": "false",
    "n": "20",
    "markdown": "false",
    "json": "false",
}


def run(line: CommandLine) -> int:
    """Print the comparison. Returns 1 if a product is slower by more than `fail_above` percent, else 0.

    Raises UserError for sides that cannot be read or compared.
    """
    given = options(line, _DEFAULTS)
    if line.flags:
        raise UserError(f"diff: {line.flags[0][0]}: no flag of this command; expected {', '.join(_DEFAULTS)}=")
    if len(line.paths) != 2:
        raise UserError(
            f"diff: {counted(len(line.paths), 'side')} given; expected two runs or tables, such as "
            f"gemmpipe diff last~1 last"
        )
    rules = DiffRules(
        same_within_pct=_percent("same_within", given["same_within"]),
        default_noise_pct=_percent("default_noise", given["default_noise"]) if given["default_noise"] else None,
        across=is_true("across", given["across"]),
    )
    limit_pct = _percent("fail_above", given["fail_above"]) if given["fail_above"] else None
    most, in_markdown = whole_number("n", given["n"]), is_true("markdown", given["markdown"])
    in_json = is_true("json", given["json"])
    if in_markdown and in_json:
        raise UserError("diff: markdown=true and json=true given; expected one of them")
    found = compare(*read_sides(*line.paths, "diff"), rules)
    shown = most or max(1, len(found.pairs))
    with naming_write_errors(STDOUT):
        if in_json:
            print(as_json(found, limit_pct))
        else:
            for text in markdown_lines(found, shown) if in_markdown else text_lines(found, terminal_width(), shown):
                print(text)
    return 0 if limit_pct is None else _gate(found, limit_pct, quiet=in_json)


def _gate(found: Difference, limit_pct: float, *, quiet: bool) -> int:
    """The exit code of a gate, with its line. Raises UserError if nothing was compared: such a gate checks nothing."""
    if not found.pairs:
        raise UserError("fail_above: no product was compared; expected sides with common products of one device")
    failed = found.slower_by(limit_pct)
    if not quiet:
        with naming_write_errors(STDOUT):
            verdict = f"FAILED: {len(failed)} of" if failed else "passed: none of"
            compared = counted(len(found.pairs), "product")
            print(f"gate: {verdict} {compared} slower by more than {limit_pct:g} % for certain")
    return int(bool(failed))


def _percent(key: str, text: str) -> float:
    if not is_number(text) or not 0 <= float(text) <= 1000:
        raise UserError(f"{key}: '{text}' given; expected a percentage from 0 to 1000")
    return float(text)
