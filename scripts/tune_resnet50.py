"""Tune the distinct convolutions of ResNet-50, 30 s a shape, and compare them with cuDNN; options as of tune_suite.py.

python scripts/tune_resnet50.py --device cuda:0 -o results
"""

import sys

from tune_suite import main

if __name__ == "__main__":
    sys.exit(main(prog="tune_resnet50", suite="resnet50", seconds=30.0))
