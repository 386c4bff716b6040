"""What a search counts of its log: all but the failures that were faults of the host or of the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tvmconv.logs.record import Record
from tvmconv.measure import faults


def drop_environment_failures(records: Sequence[Record], naive_name: str | None) -> list[Record]:
    """Return the records without those failures that say nothing of their configs, which are to be tried again.

    These are failures whose messages name the environment; and those of a time in which nothing ran, not even the naive
    schedule, which is right on every device.

    Args:
        records: of one workload on one device, in the order of the log.
        naive_name: name of the naive schedule; None if there is none.
    """
    kept_records: list[Record] = []
    for ok, group in itertools.groupby(records, key=lambda record: record.ok):
        streak = list(group)
        kept_records += streak if ok else _select_config_failures(streak, naive_name, len(streak) == len(records))
    return kept_records


def _select_config_failures(
    streak: Sequence[Record], naive_name: str | None, has_no_other_record: bool
) -> list[Record]:
    """Return those of several failures in a row that are the configs' own.

    Args:
        streak: the failures; no record between them succeeded.
        naive_name: name of the naive schedule.
        has_no_other_record: whether the log has no other record. If it has, the naive schedule may have failed by
            itself.
    """
    suspects = [record for record in streak if faults.is_doubtful(record.error, record.message)]
    has_naive_failure = any(record.schedule == naive_name for record in suspects)
    has_other_failure = any(record.schedule != naive_name for record in suspects)
    is_environment_fault = has_naive_failure and (has_other_failure or has_no_other_record)
    dropped_ids = {
        id(record) for record in suspects if is_environment_fault or faults.is_environment_fault(record.message)
    }
    return [record for record in streak if id(record) not in dropped_ids]
