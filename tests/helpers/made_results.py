"""Results, sweeps and records made by hand, with times in microseconds."""

from tvmconv.devices import Timing
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.record import Record
from tvmconv.workloads import parse


def make_row(name, micros=None, *, cold=False, **fields):
    """A row with a time; without one, its schedule or library failed."""
    if micros is None:
        return ResultRow(name, **{"failure": "broken", **fields})
    return ResultRow(name, timing=Timing((micros * 1e-6,), "by hand", cold), **fields)


def make_result(text, *rows, device="a GPU", **peaks):
    """The result of a workload on one device."""
    return Result(parse(text), "cuda:0", device, 0, rows, **peaks)


def make_sweep(results, counts=(), name="mine-tuned"):
    """A sweep of results by label."""
    return Sweep(name, [*results], [*results.values()], "here", [*counts])


def make_record(workload, micros, schedule="direct", **fields):
    """A record of a trial, which failed if it took no time."""
    times = (micros * 1e-6,) if micros else ()
    return Record(workload, schedule, {}, "a GPU", "cuda", times=times, **fields)
