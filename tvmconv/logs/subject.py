"""The subject of a record: what was measured, and where; the records of a search differ in their configs only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tvmconv.errors import RecordError
from tvmconv.logs import autotvm, fields
from tvmconv.workloads import Workload


class Subject(NamedTuple):
    """What was measured, and where.

    Attributes:
        workload: what is computed.
        schedule: the name of the schedule that computes it.
        device: the device's name, such as "NVIDIA H200"; for a line of AutoTVM's its target's model.
        target: AutoTVM's target text, such as "cuda -arch=sm_90" or "opencl".
    """

    workload: Workload
    schedule: str
    device: str
    target: str

    def to_json(self) -> dict[str, Any]:
        """The keys that a line begins with: our own, and AutoTVM's `input`."""
        task, args = autotvm.encode_task(self.workload, self.schedule)
        return {
            "workload": self.workload.text,
            "schedule": self.schedule,
            "device": self.device,
            "input": [self.target, task, args, {}],
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Subject:
        """The subject of a line, from AutoTVM's `input` where the line has no keys of ours.

        Raises:
            RecordError: the keys are malformed, there is no schedule for the task, or our keys contradict AutoTVM's.
        """
        target, task, args, kwargs = fields.array(row.get("input"), "input", 4)
        target, task = fields.line(target, "the target"), fields.line(task, "the task's name")
        args = fields.array(args, "the task's arguments")
        if kwargs != {}:
            raise RecordError("the task has keyword arguments, which no schedule takes", fields.shown(kwargs))
        device = fields.line(row["device"], "device") if "device" in row else autotvm.model(target)
        if "workload" not in row and "schedule" not in row:
            return cls(*autotvm.decode_task(task, args), device, target)
        workload = autotvm.parse_workload(fields.text(row.get("workload"), "workload"))
        schedule = fields.line(row.get("schedule"), "schedule")
        if autotvm.encode_task(workload, schedule) != (task, args):
            told = autotvm.decode_task(task, args)  # the same in another spelling, such as a short padding, is no error
            if told != (workload, schedule):
                raise RecordError("workload and schedule contradict the task", f"{schedule} of {workload}, but {task}")
        return cls(workload, schedule, device, target)
