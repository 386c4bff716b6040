"""The workloads of schedules that a file of the tests lists."""

import itertools
from pathlib import Path

from combinations import EPILOGUES
from cubins import DTYPES

PATH = Path(__file__).parents[1] / "data/workloads_of_schedules.txt"
EVERY_ORDER = (*EPILOGUES, "relu,add", "relu,bias,add")  # the last two are what a sum cannot begin with


def listed(kind):
    """The workloads of a kind (nasty, deep or layer) by schedule."""
    found = {}
    for line in PATH.read_text(encoding="utf-8").splitlines():
        words = line.partition("#")[0].split()
        if words and words[1] == kind:
            found.setdefault(words[0], []).append(words[2])
    return found


def with_choices(texts, orders=EVERY_ORDER):
    """Each with channels last, and with a dtype and an epilogue in turn, so that each dtype meets each epilogue."""
    choices = itertools.cycle((dtype, order) for order in orders for dtype in DTYPES)
    return [
        ",".join(filter(None, (text, dtype, "nhwc", order)))
        for text, (dtype, order) in zip(texts, choices, strict=False)
    ]
