"""Reading CSV that someone else wrote: one line a row, blanks around cells dropped, blank lines left out."""

import csv
from collections.abc import Iterator
from pathlib import Path

from gemmpipe.errors import UserError


def read_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, stripped cells), the header first; nothing of an empty file.

    Raises UserError: unreadable, not UTF-8, a quote that is not closed in its line.
    """
    line = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, skipinitialspace=True, strict=True)
            for cells in reader:
                if reader.line_num != line + 1:  # a stray quote would swallow the rows that follow
                    raise UserError(
                        f"{path}:{line + 1}: a quote that is not closed in its line, expected one line a row"
                    )
                line = reader.line_num
                if any(cells):
                    yield line, [cell.strip() for cell in cells]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}:{line + 1}: not text in UTF-8, expected a CSV file") from None
    except csv.Error as error:
        raise UserError(f"{path}:{line + 1}: no CSV: {error}") from None
