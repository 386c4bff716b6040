"""Tune the channel sweep of the d2l-tvm chapter for 60 s per shape, and compare it with cuDNN.

python scripts/tune_d2l.py --device cuda:0 -o results

The options are those of `tvmconv bench tune-suite`.
"""

import sys

from tvmconv.cli.bench import run_script

if __name__ == "__main__":
    sys.exit(run_script("tune-suite", "tune_d2l", suite="d2l", seconds=60.0))
