"""Measuring in tests: one builder, short timeouts, every record waited for."""

import time

from faulty_schedules import SCHEDULE, WORKLOAD

from tvmconv.logs.record import Record
from tvmconv.measure.measurer import Measurer

DEADLINE = 120.0


def measurer(device="opencl:0", schedule=SCHEDULE, workload=WORKLOAD, **options):
    """A measurer, by default of the faulty schedule."""
    defaults = {"workers": 1, "build_timeout": 20.0, "run_timeout": 20.0, "memory_limit": 1 << 30}
    return Measurer(workload, schedule, [device], **{**defaults, **options})


def measure(configs, **options):
    """The records of the configs."""
    with measurer(**options) as m:
        m.submit(configs)
        return collect(m)


def collect(m):
    """The records of all that is pending; fails when they do not come."""
    records = []
    start = time.monotonic()
    while m.num_pending and time.monotonic() - start < DEADLINE:
        records += map(Record.from_measurement, m.collect_results(timeout=1.0))
    assert m.num_pending == 0
    return records
