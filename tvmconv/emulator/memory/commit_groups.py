"""Commit groups: asynchronous operations that lanes issue, commit as a group, and wait for except for the last groups.

Source: PTX ISA, "cp.async.commit_group", "cp.async.bulk.commit_group" and "wgmma.commit_group".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.threads import Lanes


@dataclass(frozen=True)
class AsyncOps:
    """Operations of one instruction."""

    lanes: Lanes  # lane that issued each operation
    group_indices: NDArray[np.int64]  # commit group of each operation among those of its lane
    values: tuple[NDArray[Any], ...]  # arrays with a row for each operation
    context: Any = None  # what the operations share


class CommitGroups:
    """Pending operations of all lanes, in `pending`."""

    def __init__(self, num_lanes: int) -> None:
        self._num_committed = np.zeros(num_lanes, np.int64)
        self.pending: list[AsyncOps] = []

    def issue(self, lanes: Lanes, *values: NDArray[Any], context: Any = None) -> AsyncOps:
        """Add an operation of each lane, and return them."""
        self.pending.append(AsyncOps(lanes, self._num_committed[lanes], values, context))
        return self.pending[-1]

    def commit(self, lanes: Lanes) -> None:
        """Commit each lane's operations since its last commit as a group."""
        self._num_committed[lanes] += 1

    def wait(self, lanes: Lanes, max_pending_groups: int) -> list[AsyncOps]:
        """Remove and return the operations of lanes in all groups but the last `max_pending_groups`."""
        is_waiting = np.zeros(len(self._num_committed), bool)
        is_waiting[lanes] = True
        completed: list[AsyncOps] = []
        remaining: list[AsyncOps] = []
        for ops in self.pending:
            num_committed = self._num_committed[ops.lanes]
            is_complete = is_waiting[ops.lanes] & (ops.group_indices < num_committed - max_pending_groups)
            for is_part, parts in ((is_complete, completed), (~is_complete, remaining)):
                if is_part.any():
                    values = tuple(rows[is_part] for rows in ops.values)
                    parts.append(AsyncOps(ops.lanes[is_part], ops.group_indices[is_part], values, ops.context))
        self.pending = remaining
        return completed
