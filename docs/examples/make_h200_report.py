"""Write h200_report.html beside this file: the report of the run in h200_run.tar.xz, measured on an H200 on 2026-11-23.

Run it from the root of the checkout: python docs/examples/make_h200_report.py
The run: gemmpipe kernel=a8w8_blockscale shapes=llama70b retune=true, with an empty compile cache. Its times are from
before separate launches, which the page says.
"""

import os
import sys
import tarfile
import tempfile
from pathlib import Path

from gemmpipe.cli.main import main

FOLDER = Path(__file__).resolve().parent
RUN = "h200_run"


def unpack(folder: Path) -> Path:
    """Unpack the recorded run into a folder; the folder of the run."""
    with tarfile.open(FOLDER / f"{RUN}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / RUN


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(folder))
        os.chdir(folder)  # the page names the run as the command does
        sys.exit(main(["report", RUN, f"out={FOLDER / 'h200_report.html'}"]))
