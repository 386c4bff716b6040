"""Time the optimization steps of the schedules on a suite's layers; the same as `tvmconv bench sweep`.

python scripts/sweep.py --suite resnet50 --only 3x3 --device cuda:0 --baseline cudnn -o results
"""

import sys

from tvmconv.cli.bench import run_script

if __name__ == "__main__":
    sys.exit(run_script("sweep", "sweep"))
