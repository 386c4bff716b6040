"""The explanation of kernels as an object, for Python and for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvmconv import devices, registry
from tvmconv.cost_model.model import cost_model_for
from tvmconv.devices import Device
from tvmconv.errors import DeviceError
from tvmconv.html import make_html_bars, make_html_details
from tvmconv.kernel import Kernel, build, resolve_device
from tvmconv.palette import find_style
from tvmconv.reports.explanation import (
    compare_kernels,
    explain_kernel,
    explanation_to_json,
    make_quantities_table,
)
from tvmconv.space import Value
from tvmconv.target import Target
from tvmconv.tvm_import import import_tvm
from tvmconv.workloads import Workload, parse

DEFAULT_ARCH = "sm_90"


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why kernels take their time, counted from their code.

    Attributes:
        kernels: Kernels of one workload by name.
        device_spec: Peak rates of the GPU; None if they are unknown, and then there are no times.

    Examples:
        >>> import tvmconv as tc
        >>> explanation = tc.explain("conv2d:1x8x8x8,8x8x3x3,s1,p1", "tiling", "columns", arch="sm_90")
        >>> explanation
        <Explanation of tiling, columns for conv2d:1x8x8x8,8x8x3x3,s1,p1 on sm_90>
        >>> sorted(explanation.to_json()[0])[:3]
        ['components', 'config', 'device']
        >>> sorted(explanation.predicted_seconds)
        ['columns', 'tiling']
    """

    kernels: Mapping[str, Kernel]
    device_spec: Target | None

    def __repr__(self) -> str:
        kernel = next(iter(self.kernels.values()))
        return f"<Explanation of {', '.join(self.kernels)} for {kernel.workload.text} on {kernel.device.text}>"

    def __str__(self) -> str:
        kernels = [*self.kernels.values()]
        if len(kernels) == 1:
            return explain_kernel(kernels[0], self.device_spec)
        return compare_kernels(kernels, self.device_spec, [*self.kernels])

    @property
    def predicted_seconds(self) -> dict[str, float]:
        """Predicted seconds per launch by name; kernels without a prediction are left out."""
        return {each["name"]: each["predicted_seconds"] for each in self.to_json() if each["predicted_seconds"]}

    def to_json(self) -> list[dict[str, Any]]:
        """Return counts and predicted times as JSON values, one object per kernel."""
        return [explanation_to_json(kernel, self.device_spec, name) for name, kernel in self.kernels.items()]

    def _repr_html_(self) -> str:
        table = make_quantities_table([*self.kernels.values()], self.device_spec, [*self.kernels])
        seconds = self.predicted_seconds
        labels = {name: f"{value * 1e6:.3g} µs predicted" for name, value in seconds.items()}
        colors = {name: find_style(name).color for name in seconds}
        return make_html_bars(seconds, labels, colors) + table.format_html() + make_html_details("In full", str(self))


def explain(
    workload: Workload | str | Kernel,
    *schedules: str | registry.Schedule,
    arch: str | None = None,
    device: str | Device | None = None,
    config: Mapping[str, Value] | None = None,
) -> Explanation:
    """Explain why a kernel takes its time, or how several kernels differ, from their code; no kernel runs.

    Args:
        workload: Workload, its text, or a kernel that is built already.
        schedules: Schedules, or their names; without a kernel at least one.
        arch: CUDA architecture to compile for, such as "sm_90"; by default that of the first GPU, or sm_90 without one.
        device: CUDA device to compile for; excludes `arch`.
        config: Values by knob name, for all schedules; missing knobs take their defaults.

    Returns:
        The explanation, which prints as a text and shows itself in notebooks.

    Raises:
        DeviceError: The device is not an NVIDIA architecture.
        ScheduleError: There is no such schedule for this workload, or no schedule is named.
        KnobError: A knob does not exist or does not accept its value.
        CompileError: A kernel cannot be compiled.

    Examples:
        >>> print(explain("conv2d:1x8x8x8,8x8x3x3,s1,p1", "tiling", arch="sm_90"))  # doctest: +ELLIPSIS
        conv2d:1x8x8x8,8x8x3x3,s1,p1 by tiling on sm_90
        ...
    """
    import_tvm()
    if isinstance(workload, Kernel):
        kernels = {workload.schedule.name: workload}
        target_device, parsed_workload = workload.device, workload.workload
    else:
        kernels, target_device = {}, _find_target(arch, device)
        parsed_workload = parse(workload) if isinstance(workload, str) else workload
    if target_device.arch is None:
        raise DeviceError(f"{target_device.text} is not an NVIDIA architecture, which explain needs: pass arch='sm_90'")
    selected = [registry.as_schedule(parsed_workload, schedule) for schedule in schedules]
    if not kernels and not selected:
        registry.find_schedule(parsed_workload, "")  # raises an error that lists the schedules
    for schedule in selected:
        kernels[schedule.name] = build(parsed_workload, schedule, device=target_device, config=config)
    return Explanation(kernels, find_device_spec(target_device))


def _find_target(arch: str | None, device: str | Device | None) -> Device:
    if arch is not None or device is not None:
        return resolve_device(device, arch)
    try:
        return devices.find_device("cuda")
    except devices.DeviceNotFoundError:
        return devices.Arch(DEFAULT_ARCH)


def find_device_spec(device: Device) -> Target | None:
    """Return the peak rates of a device, or None if they are unknown. An architecture has the rates of the GPU whose
    records trained its cost model.
    """
    if isinstance(device, devices.Arch):
        cost_model = cost_model_for(device.arch)
        return cost_model.device_spec if cost_model else None
    return device.target
