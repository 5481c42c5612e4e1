"""Write h200_report.html beside this file: the report of the shipped a8w8_blockscale table, measured on an H200.

Run it from the root of the checkout: python docs/examples/make_h200_report.py
"""

import sys
from pathlib import Path

from gemmpipe.cli.main import main

TABLE = "outputs/tuned/a8w8_blockscale_tuned_gemm.csv"

if __name__ == "__main__":
    sys.exit(main(["report", TABLE, f"out={Path(__file__).parent.relative_to(Path.cwd()) / 'h200_report.html'}"]))
