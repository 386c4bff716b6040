"""Filters worked out by hand: a signal and an image with their masks, and what comes out at some places."""

import numpy as np

from tvmconv.workloads import Filter1d, Filter2d

SIGNAL = np.arange(1, 8, dtype="float32")
TAPS = np.array([3, 4, 5, 4, 3], "float32")

IMAGE = np.array(
    [
        [1, 2, 3, 4, 5, 6, 7],
        [2, 3, 4, 5, 6, 7, 8],
        [3, 4, 5, 6, 7, 8, 9],
        [4, 5, 6, 7, 8, 5, 6],
        [5, 6, 7, 8, 5, 6, 7],
        [6, 7, 8, 9, 0, 1, 2],
        [7, 8, 9, 0, 1, 2, 3],
    ],
    "float32",
)[..., np.newaxis]
MASK = np.array(
    [[1, 2, 3, 2, 1], [2, 3, 4, 3, 2], [3, 4, 5, 4, 3], [2, 3, 4, 3, 2], [1, 2, 3, 2, 1]],
    "float32",
)

# Workload, inputs, and some outputs by their places. At the signal's place 1 a ghost cell is met.
WORKED = [
    (Filter1d(7, 5), (SIGNAL, TAPS), {(1,): 38, (2,): 57, (3,): 76}),
    (Filter2d(7, 7, 1, 5, 5), (IMAGE, MASK), {(2, 2, 0): 321}),
]
