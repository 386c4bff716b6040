"""What a search counts of its log: all but the failures that were faults of the host or of the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tvmconv.logs.record import Record
from tvmconv.measuring import faults


def without_faults(records: Sequence[Record], naive: str | None) -> list[Record]:
    """Return the records without those failures that say nothing of their configs, which are to be tried again.

    These are failures whose messages name the environment; and those of a time in which nothing ran, not even the naive
    schedule, which is right on every device.

    Args:
        records: of one workload on one device, in the order of the log.
        naive: name of the naive schedule; None if there is none.
    """
    kept: list[Record] = []
    for ok, group in itertools.groupby(records, key=lambda record: record.ok):
        stretch = list(group)
        kept += stretch if ok else _own_failures(stretch, naive, len(stretch) == len(records))
    return kept


def _own_failures(stretch: Sequence[Record], naive: str | None, nothing_ran: bool) -> list[Record]:
    """Return those of several failures in a row that are the configs' own.

    Args:
        stretch: the failures; no record between them succeeded.
        naive: name of the naive schedule.
        nothing_ran: whether the log has no other record. If it has, the naive schedule may have failed by itself.
    """
    doubtful = [record for record in stretch if faults.is_doubtful(record.error, record.message)]
    naive_failed = any(record.schedule == naive for record in doubtful)
    others_failed = any(record.schedule != naive for record in doubtful)
    is_fault = naive_failed and (others_failed or nothing_ran)
    dropped = {id(record) for record in doubtful if is_fault or faults.names_environment(record.message)}
    return [record for record in stretch if id(record) not in dropped]
