"""Tune the distinct convolutions of ResNet-50 for 30 s per shape, and compare them with cuDNN.

python scripts/tune_resnet50.py --device cuda:0 -o results

The options are those of `tvmconv bench tune-suite`.
"""

import sys

from tvmconv.cli.bench import run_script

if __name__ == "__main__":
    sys.exit(run_script("tune-suite", "tune_resnet50", suite="resnet50", seconds=30.0))
