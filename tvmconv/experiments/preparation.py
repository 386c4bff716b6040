"""What runs in an experiment: schedules with the values of their knobs, inputs, and kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence

from tvmconv import compat, naive_cost, registry
from tvmconv.cost_model.model import cost_model_for
from tvmconv.devices import Device
from tvmconv.errors import Error, KnobError, ScheduleError
from tvmconv.experiments.results import PREDICTED, TUNED, UNTUNED
from tvmconv.kernel import Kernel
from tvmconv.logs.build import build
from tvmconv.logs.ranking import LogPaths
from tvmconv.predicted_kernel import build_fastest_default, default_candidate_schedules
from tvmconv.registry import Schedule
from tvmconv.space import Config, Knob, Value, suggest_knob
from tvmconv.verification import Problem
from tvmconv.workloads import Workload
from tvmconv.workloads.conv_operator import ConvOperator


class PreparedExperiment:
    """An experiment before it is measured, with the arguments and errors of `run_schedules`.

    Attributes:
        schedules: Schedules to run.
        automatic_rows: Names of further rows, of the log's record and of the cost model's prediction.
        default_config_names: Names of the schedules that run with their default config.
        problem: Inputs and reference outputs.
    """

    def __init__(
        self,
        workload: Workload,
        schedules: Sequence[str] | None = None,
        *,
        device: Device,
        config: Mapping[str, Value] | None = None,
        seed: int | None = None,
        log: LogPaths | None = None,
        ladder: bool = True,
        predicted: bool = False,
        verify: str = "auto",
    ) -> None:
        self.schedules = select_schedules(workload, schedules, device) if ladder else []
        configs = distribute_config(workload, self.schedules, config or {}, schedule_names=schedules)
        self.default_config_names = frozenset(name for name, own_config in configs.items() if not own_config)
        self.problem = Problem(workload, seed, mode=verify)
        self._results: dict[str, Kernel | Error] = {}
        automatic_builders: dict[str, Callable[[], Kernel]] = {}
        if predicted and cost_model_for(device.arch) and isinstance(workload, ConvOperator):
            # The experiment itself compares the prediction with default configs, so that `check` is not needed.
            automatic_builders[PREDICTED] = functools.partial(build, workload, device=device, check=False)
            untuned_names = {schedule.name for schedule in default_candidate_schedules(workload, device)}
            if not untuned_names <= self.default_config_names:  # otherwise all default configs run already
                automatic_builders[UNTUNED] = functools.partial(build_fastest_default, workload, device)
        if log is not None:
            automatic_builders[TUNED] = functools.partial(build, workload, device=device, log=log)
        self.automatic_rows = [*automatic_builders]
        self._builders: dict[str, Callable[[], Kernel]] = {
            schedule.name: functools.partial(build, workload, schedule, device=device, config=configs[schedule.name])
            for schedule in self.schedules
        } | automatic_builders

    def get_kernel(self, name: str) -> Kernel:
        """Return the kernel of a schedule or of an automatic row, which is built at the first call."""
        if name not in self._results:
            try:
                self._results[name] = self._builders[name]()
            except Error as error:
                self._results[name] = error
        result = self._results[name]
        if isinstance(result, Error):
            raise result
        return result

    def add_kernel(self, name: str, kernel: Kernel | Error) -> None:
        """Add a row of this name with a kernel that was built elsewhere, or with the reason why there is none."""
        self._results[name] = kernel
        self.automatic_rows.append(name)

    def build_all_kernels(self) -> PreparedExperiment:
        """Compute inputs and reference outputs, build all kernels, and return the experiment."""
        _ = self.problem.expected_output
        for name in self._builders:
            with contextlib.suppress(Error):  # `get_kernel` raises the error again
                _ = self.get_kernel(name).executable
        return self


def select_schedules(workload: Workload, names: Sequence[str] | None, device: Device) -> list[Schedule]:
    """Return the schedules to run, with the naive schedule first. Without names, all schedules run that support the
    device. A naive schedule that was not named and takes too long is left out if other schedules run
    (`tvmconv.naive_cost`).
    """
    available = registry.schedules(workload)
    if not available:
        raise ScheduleError(f"no schedule computes {workload.operator} in {workload.dtype}")
    naive_schedule = registry.get_baseline_schedule(workload)
    if names:
        requested = [registry.find_schedule(workload, name) for name in names]
        for schedule in requested:
            schedule.check_runs_on(device.kind, device.arch, device.text)
        selected = [schedule for schedule in available if schedule in (naive_schedule, *requested)]
    else:
        selected = [schedule for schedule in available if schedule.can_run_on(device.kind, device.arch)]
        if not selected:
            available[0].check_runs_on(device.kind, device.arch, device.text)
    omitted_schedule = find_omitted_naive(workload, names, device)
    kept_schedules = [schedule for schedule in selected if schedule != omitted_schedule]
    return sorted(kept_schedules, key=lambda schedule: schedule != naive_schedule)


def find_omitted_naive(workload: Workload, names: Sequence[str] | None, device: Device) -> Schedule | None:
    """Return the naive schedule if it was not named and takes too long to run, else None."""
    naive_schedule = registry.get_baseline_schedule(workload)
    if naive_schedule is None or naive_schedule.name in (names or ()) or naive_cost.is_affordable(workload, device):
        return None
    other_schedules = [schedule for schedule in registry.schedules(workload) if schedule != naive_schedule]
    if not names and not any(schedule.can_run_on(device.kind, device.arch) for schedule in other_schedules):
        return None  # no other schedule runs
    return naive_schedule


def list_unsupported_schedules(workload: Workload, device: Device) -> list[Schedule]:
    """Return the schedules of a workload that do not support the device."""
    return [schedule for schedule in registry.schedules(workload) if not schedule.can_run_on(device.kind, device.arch)]


def distribute_config(
    workload: Workload,
    schedules: Sequence[Schedule],
    config: Mapping[str, Value],
    *,
    schedule_names: Sequence[str] | None = None,
) -> dict[str, Config]:
    """Return for each schedule, by name, the values of its own knobs; the config is for `schedule_names`, or for all.

    Raises:
        KnobError: No schedule has such a knob, or accepts the value.
    """
    configs: dict[str, Config] = {schedule.name: {} for schedule in schedules}
    if not config:
        return configs
    receivers = [schedule for schedule in schedules if not schedule_names or schedule.name in schedule_names]
    knobs: dict[str, Mapping[str, Knob]] = {}
    for schedule in receivers:
        try:
            knobs[schedule.name] = schedule.space(workload).knobs
        except ScheduleError:  # building fails again, and its row gets the reason
            configs[schedule.name] = dict(config)
    if not knobs:
        return configs
    knob_names = dict.fromkeys(name for own_knobs in knobs.values() for name in own_knobs)
    for name in config:
        if not any(compat.rename_knob(schedule, name) in own_knobs for schedule, own_knobs in knobs.items()):
            suggestion = suggest_knob(name, {knob: own[knob] for own in knobs.values() for knob in own})
            raise KnobError(
                f"no knob {name!r} in {', '.join(knobs)}{suggestion}; there are: {', '.join(knob_names) or 'none'}; "
                f"tvmconv schedules {workload.text} {next(iter(knobs))} explains them"
            )
    for name, own_knobs in knobs.items():
        configs[name] = compat.rename_requested_config(
            name, {knob: value for knob, value in config.items() if compat.rename_knob(name, knob) in own_knobs}
        )
    _check_values(workload, [schedule for schedule in receivers if schedule.name in knobs], configs)
    return configs


def _check_values(workload: Workload, schedules: Sequence[Schedule], configs: Mapping[str, Config]) -> None:
    """Raise the first schedule's KnobError if no schedule accepts its values."""
    errors: list[KnobError] = []
    for schedule in schedules:
        if configs[schedule.name]:
            try:
                schedule.apply(workload, configs[schedule.name])
            except KnobError as error:
                errors.append(error)
            except ScheduleError:  # its cause is not a value
                return
            else:
                return
    if errors:
        raise errors[0]
