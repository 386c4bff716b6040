"""The key of a record: workload, schedule, device and target, which all records of a search share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tvmconv.errors import RecordError
from tvmconv.logs import autotvm, json_checks
from tvmconv.workloads import Workload


class RecordKey(NamedTuple):
    """The key of a record."""

    workload: Workload
    schedule: str
    device: str  # name of the device, such as "NVIDIA H200"; for lines of AutoTVM, the model of the target
    target: str  # AutoTVM's target text, such as "cuda -arch=sm_90" or "opencl"

    def to_json(self) -> dict[str, Any]:
        """Return the first keys of a line: those of tvmconv, and AutoTVM's `input`."""
        task, args = autotvm.encode_task(self.workload, self.schedule)
        return {
            "workload": self.workload.text,
            "schedule": self.schedule,
            "device": self.device,
            "input": [self.target, task, args, {}],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RecordKey:
        """Return the key of a line, from AutoTVM's `input` if the line has no keys of tvmconv."""
        target, task, args, kwargs = json_checks.check_list(data.get("input"), "input", 4)
        target, task = json_checks.check_line(target, "the target"), json_checks.check_line(task, "the task's name")
        args = json_checks.check_list(args, "the task's arguments")
        if kwargs != {}:
            raise RecordError("the task has keyword arguments, which no schedule takes", json_checks.abbreviate(kwargs))
        device = (
            json_checks.check_line(data["device"], "device") if "device" in data else autotvm.parse_model_name(target)
        )
        if "workload" not in data and "schedule" not in data:
            return cls(*autotvm.decode_task(task, args), device, target)
        workload = autotvm.parse_workload(json_checks.check_text(data.get("workload"), "workload"))
        schedule = json_checks.check_line(data.get("schedule"), "schedule")
        # The task may be written in another way, for example with a short padding, so that decoding it decides.
        is_equal_text = autotvm.encode_task(workload, schedule) == (task, args)
        if not is_equal_text and autotvm.decode_task(task, args) != (workload, schedule):
            raise RecordError("workload and schedule contradict the task", f"{schedule} of {workload}, but {task}")
        return cls(workload, schedule, device, target)
