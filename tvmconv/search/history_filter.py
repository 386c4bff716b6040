"""Selection of the log's records that a search counts: all except failures that the host or the device caused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tvmconv.logs.record import Record
from tvmconv.measure import faults


def drop_environment_failures(records: Sequence[Record], naive_name: str | None) -> list[Record]:
    """Return the records without failures that the environment caused, so that their configs are tried again.

    A failure is left out if its message names the environment, or if it is part of a streak in which even the naive
    schedule failed, which is correct on every device. The records are those of one workload on one device, in the order
    of the log.
    """
    kept_records: list[Record] = []
    for ok, group in itertools.groupby(records, key=lambda record: record.ok):
        streak = list(group)
        kept_records += streak if ok else _select_config_failures(streak, naive_name, len(streak) == len(records))
    return kept_records


def _select_config_failures(
    streak: Sequence[Record], naive_name: str | None, has_no_other_record: bool
) -> list[Record]:
    """Return those of several consecutive failures that the configs caused.

    If the log has other records, a lone failure of the naive schedule does not prove a fault of the environment.
    """
    suspects = [record for record in streak if faults.is_doubtful(record.error, record.message)]
    has_naive_failure = any(record.schedule == naive_name for record in suspects)
    has_other_failure = any(record.schedule != naive_name for record in suspects)
    is_environment_fault = has_naive_failure and (has_other_failure or has_no_other_record)
    dropped_ids = {id(each) for each in suspects if is_environment_fault or faults.is_environment_fault(each.message)}
    return [record for record in streak if id(record) not in dropped_ids]
