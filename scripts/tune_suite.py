"""Tune every layer of a suite and compare it with libraries; the same as `tvmconv bench tune-suite`.

python scripts/tune_suite.py --suite mobilenet --only depthwise --seconds 20 --device cuda:0 -o results
"""

import sys

from tvmconv.cli.bench import run_script

if __name__ == "__main__":
    sys.exit(run_script("tune-suite", "tune_suite"))
