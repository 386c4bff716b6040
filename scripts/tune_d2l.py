"""Tune the d2l-tvm chapter's sweep over channels, 60 s a shape, and compare it with cuDNN; options as of tune_suite.py.

python scripts/tune_d2l.py --device cuda:0 -o results
"""

import sys

from tune_suite import main

if __name__ == "__main__":
    sys.exit(main(prog="tune_d2l", suite="d2l", seconds=60.0))
