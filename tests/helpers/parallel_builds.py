"""Kernels built for an architecture by all processors, for tests on a GPU: most of their time is compilation."""

import math
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import tvmconv as tc
from tvmconv.errors import Error
from tvmconv.measure.serialization import decode_executable, encode_executable

MAX_PROCESSES = 16


def build_all(cases, arch):
    """Build kernels in parallel.

    Args:
        cases: Pairs of a schedule's name and a workload's text, or triples with the items of a config.
        arch: CUDA architecture.

    Returns:
        A dict from each case to its executable, or to the message of the error that building raised.
    """
    num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES, len(cases))
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        built = pool.map(_build, cases, [arch] * len(cases))
        return {case: _decode(result) for case, result in zip(cases, built, strict=True)}


def _build(case, arch):
    schedule, text, *items = case
    try:
        return encode_executable(tc.build(text, schedule, arch=arch, config=dict(*items)).executable, math.inf)
    except Error as error:
        return str(error)


def _decode(result):
    return result if isinstance(result, str) else decode_executable(*result)[0]
