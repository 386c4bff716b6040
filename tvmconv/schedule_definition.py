"""Registered schedule: a named function that computes the workloads of one operator, and what is known about it."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tvmconv import compat
from tvmconv.errors import KnobError, ScheduleError, ScheduleFailure
from tvmconv.html import make_html_details
from tvmconv.space import Columns, Config, Knobs, Value, format_value
from tvmconv.space.search_space import ANY_GPU, ResourceUsage, Space
from tvmconv.target import BlockLimits, parse_arch_number
from tvmconv.user_code import translate_user_errors
from tvmconv.workloads.dtypes import get_tir_dtype
from tvmconv.workloads.epilogue import STATS

if TYPE_CHECKING:
    from tvm.s_tir import Schedule as TirSchedule

    from tvmconv.workloads import Workload

DEVICE_KINDS = ("cuda", "opencl")

ScheduleFunction = Callable[["TirSchedule", Any, Knobs], "TirSchedule | None"]


@dataclass(frozen=True, repr=False)
class Schedule:
    """A named way to compute the workloads of one operator.

    Its functions may be user code. Any exception that they raise is raised again as a one-line `ScheduleFailure` that
    names the schedule and the source line.

    Attributes:
        name: Name of the schedule, as used on the command line and in logs.
        operator: Operator whose workloads it computes, such as `conv2d`.
        function: `f(s, w, k)`, which `schedule` describes, like the attributes that are its arguments.
        dtypes: Dtypes that it supports.
        order: Position among the schedules of its package, in import order.
        usage: `f(w, columns)`, which computes the `ResourceUsage` of many configs; None if it has none.
        condition: `f(w)`, which returns whether it supports a workload; None if it supports all of its dtypes.
        search_if: `f(w)`, which returns whether a search tries it by default; None for never.
        starting_configs: `f(w)`, which returns the configs that a search tries after the default; None for no others.
        supersedes: Names of schedules that a search skips when it tries this one.
        defers_when: `f(w)`, which returns whether other searched schedules come first; None for never.
        estimate_seconds: `f(w)`, which returns the estimated seconds of a good config; None if it has none.
        device_kinds: Kinds of devices that it supports, among `DEVICE_KINDS`.
        baseline: Whether speed-ups are relative to this schedule.
        min_arch: Lowest NVIDIA architecture that it supports, such as 80 for sm_80; 0 for any.
        exact_arch: The only NVIDIA architecture that it supports, such as 90 for sm_90; 0 for any.
        computes_stats: Whether it computes the epilogue operation `stats`, where its condition holds.
        features: Properties of workloads that it supports, among `tvmconv.workloads.features.ALL_FEATURES`, where its
            condition holds.

    Examples:
        >>> import tvmconv as tc
        >>> w = tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1")
        >>> tiling = next(schedule for schedule in tc.schedules(w) if schedule.name == "tiling")
        >>> tiling.is_applicable(w), tiling.is_searched_by_default(w), tiling.is_deferred(w)
        (True, False, False)
        >>> tiling.can_run_on("cuda", "sm_90"), tiling.lacks_stats(w)
        (True, False)
        >>> tiling.check_runs_on("opencl", None, "opencl:0")
        >>> len(tiling.space(w).knobs)
        6
        >>> s, k = tiling.apply(w)
        >>> sorted(k.config)[0]
        'tile_c'
    """

    name: str
    operator: str
    function: ScheduleFunction = field(repr=False)
    dtypes: tuple[str, ...]
    order: int
    usage: Callable[[Any, Columns], ResourceUsage] | None = field(default=None, repr=False)
    condition: Callable[[Any], bool] | None = field(default=None, repr=False)
    search_if: Callable[[Any], bool] | None = field(default=None, repr=False)
    starting_configs: Callable[[Any], Sequence[Mapping[str, Value]]] | None = field(default=None, repr=False)
    supersedes: tuple[str, ...] = ()
    defers_when: Callable[[Any], bool] | None = field(default=None, repr=False)
    estimate_seconds: Callable[[Any], float] | None = field(default=None, repr=False)
    device_kinds: tuple[str, ...] = DEVICE_KINDS
    baseline: bool = False
    min_arch: int = 0
    exact_arch: int = 0
    computes_stats: bool = False
    features: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Schedule {self.name} of {self.operator}>"

    def _repr_html_(self) -> str:
        return make_html_details(f"{self.name}: {self.summary}", self.doc)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle a registered schedule by its name and function, because its other functions may not be picklable."""
        if registered_schedules.get((self.operator, self.name)) is self:
            return _get_registered, (self.operator, self.name, self.function)
        return super().__reduce__()

    def is_applicable(self, w: Workload) -> bool:
        """Return whether the schedule can compute the workload.

        Args:
            w: Workload of any operator.

        Raises:
            ScheduleFailure: The condition of the schedule raises an exception.
        """
        if w.operator != self.operator or w.dtype not in self.dtypes:
            return False
        if self.lacks_stats(w) or self.find_missing_feature(w):
            return False
        return self._meets(self.condition, w, default=True)

    def lacks_stats(self, w: Workload) -> bool:
        """Return whether the workload has the epilogue operation `stats` and the schedule does not compute it.

        Args:
            w: Workload of any operator.

        Returns:
            Whether it lacks the operation.
        """
        return STATS in w.epilogue and not self.computes_stats

    def find_missing_feature(self, w: Workload) -> str | None:
        """Return a property of the workload that the schedule does not support, if there is one.

        Args:
            w: Workload of any operator.

        Returns:
            One of `tvmconv.workloads.features.ALL_FEATURES`, or None.

        Examples:
            >>> import tvmconv as tc
            >>> w = tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1")
            >>> columns = next(schedule for schedule in tc.schedules(w) if schedule.name == "columns")
            >>> columns.find_missing_feature(tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1,up2"))
            'upsampling'
        """
        required_features = getattr(w, "required_features", ())  # operators of one's own may have none
        return next((name for name in required_features if name not in self.features), None)

    def is_searched_by_default(self, w: Workload) -> bool:
        """Return whether a search tries the schedule by default.

        Args:
            w: Workload that the schedule can compute.

        Raises:
            ScheduleFailure: The function `search_if` raises an exception.
        """
        return self._meets(self.search_if, w)

    def is_deferred(self, w: Workload) -> bool:
        """Return whether other searched schedules come first.

        Args:
            w: Workload that the schedule can compute.

        Raises:
            ScheduleFailure: The function `defers_when` raises an exception.
        """
        return self._meets(self.defers_when, w)

    def list_starting_configs(self, w: Workload) -> list[Config]:
        """Return the configs that a search tries after the default, the most promising first.

        Args:
            w: Workload that the schedule can compute.

        Returns:
            Values by knob name. They may be of the default or not legal.

        Raises:
            ScheduleFailure: The function `starting_configs` raises an exception.

        Examples:
            >>> import tvmconv as tc
            >>> from tvmconv.registry import find_schedule
            >>> w = tc.parse("conv2d:32x128x40x40,128x128x3x3,s1,p1,f16,nhwc")
            >>> configs = find_schedule(w, "hopper").list_starting_configs(w)
            >>> [config["kernel_schedule"] for config in configs][:3]
            ['pingpong', 'pingpong', 'cooperative']
        """
        if self.starting_configs is None:
            return []
        with self._guard_user_code(self.starting_configs):
            return [dict(config) for config in self.starting_configs(w)]

    def estimate_good_config_seconds(self, w: Workload) -> float | None:
        """Return the estimated seconds of a good config on the GPU of the fit, or None if the schedule has no estimate.

        Args:
            w: Workload that the schedule can compute.

        Raises:
            ScheduleFailure: The function `estimate_seconds` raises an exception.

        Examples:
            >>> import tvmconv as tc
            >>> from tvmconv.registry import find_schedule
            >>> w = tc.parse("conv2d:32x64x56x56,64x64x3x3,s1,p1")
            >>> round(find_schedule(w, "winograd").estimate_good_config_seconds(w) * 1e6)
            74
        """
        if self.estimate_seconds is None:
            return None
        with self._guard_user_code(self.estimate_seconds):
            return float(self.estimate_seconds(w))

    def _meets(self, condition: Callable[[Any], bool] | None, w: Workload, *, default: bool = False) -> bool:
        if condition is None:
            return default
        with self._guard_user_code(condition):
            return _evaluate_condition(condition, w)

    def _guard_user_code(self, function: Callable | None = None) -> AbstractContextManager[None]:
        """Translate exceptions raised by the schedule's function, or by another of its functions."""
        modules = [getattr(code_object, "__module__", None) for code_object in (self.function, function)]
        return translate_user_errors(f"schedule {self.name}", *filter(None, modules))

    def _make_return_type_failure(self, user_function: Callable, value: object, expected: str) -> ScheduleFailure:
        name = getattr(user_function, "__name__", "it")
        reason = f"{name} returned {type(value).__name__}, expected {expected}"
        code = getattr(inspect.unwrap(user_function), "__code__", None)
        location = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code else ""
        return ScheduleFailure(f"schedule {self.name}", reason, location)

    def can_run_on(self, kind: str, arch: str | None = None) -> bool:
        """Return whether the schedule supports a kind of device, and an architecture if given.

        Args:
            kind: Kind of device, "cuda" or "opencl".
            arch: CUDA architecture, such as "sm_90"; None to check the kind only.
        """
        if kind not in self.device_kinds or arch is None:
            return kind in self.device_kinds
        arch_number = parse_arch_number(arch)
        return arch_number == self.exact_arch if self.exact_arch else arch_number >= self.min_arch

    def check_runs_on(self, kind: str, arch: str | None, device: str) -> None:
        """Check that the schedule supports a device.

        Args:
            kind: Kind of the device, "cuda" or "opencl".
            arch: CUDA architecture of the device, such as "sm_90"; None for another kind.
            device: Name of the device for the message, such as "cuda:0".

        Raises:
            ScheduleError: The schedule does not support the device.
        """
        if kind not in self.device_kinds:
            raise ScheduleError(f"schedule {self.name} is for {' and '.join(self.device_kinds)}, not for {device}")
        if not self.can_run_on(kind, arch):
            device_label = device if arch == device else f"{device}, which is {arch}"
            required_arch = f"sm_{self.exact_arch}" if self.exact_arch else f"sm_{self.min_arch} or later"
            raise ScheduleError(f"schedule {self.name} needs {required_arch}, and is not for {device_label}")

    @property
    def doc(self) -> str:
        """Full description of the schedule: the docstring of its module."""
        module = inspect.getmodule(self.function)
        if module is None:
            return ""
        if doc := inspect.getdoc(module):
            return doc
        try:  # With PYTHONOPTIMIZE=2 modules have no docstring, but their source still does.
            return ast.get_docstring(ast.parse(inspect.getsource(module))) or ""
        except (OSError, SyntaxError):
            return ""

    @property
    def summary(self) -> str:
        """First line of `doc`; of a module with several schedules, that of the function's docstring."""
        module = self.function.__module__
        is_alone = len({s.name for s in registered_schedules.values() if s.function.__module__ == module}) <= 1
        doc = self.doc if is_alone else inspect.getdoc(self.function) or self.doc
        return doc.partition("\n")[0]

    def describe_knob(self, knob: str) -> str:
        """Return the meaning of a knob, as the module `knob_descriptions` of its package has it.

        Args:
            knob: Name of the knob.

        Returns:
            The meaning: effect, unit and special values; an empty text if there is no such module.

        Examples:
            >>> from tvmconv import parse, registry
            >>> tiling = registry.find_schedule(parse("conv2d:1x16x8x8,16x16x3x3,s1,p1"), "tiling")
            >>> tiling.describe_knob("tile_c")
            'Split of the output channels: (block, thread, local), with virtual threads after the block in `vthread`.'
        """
        packages = itertools.accumulate(self.function.__module__.split("."), "{}.{}".format)
        modules = [sys.modules.get(f"{package}.knob_descriptions") for package in packages]
        return next((module.describe_knob(self.name, knob) for module in modules if module), "")

    def space(self, w: Workload, limits: BlockLimits = ANY_GPU) -> Space:
        """Return the search space of this schedule for a workload.

        Args:
            w: The workload.
            limits: Resources that a config may use; checked only if the schedule has a `usage` function. The default is
                the limits that all GPUs share.

        Returns:
            The knobs that the schedule declares, its constraints, and the resources of each config. The last spaces of
            this process are kept, and returned for equal arguments.

        Raises:
            ScheduleError: As `apply`. Methods of the space raise `ScheduleFailure` if `usage` or a constraint raises.
        """
        return _make_space(self, w, limits)

    def _compute_usage(self, w: Workload, columns: Columns) -> ResourceUsage:
        assert self.usage
        with self._guard_user_code(self.usage):
            usage = self.usage(w, columns)
        if not isinstance(usage, ResourceUsage):
            raise self._make_return_type_failure(self.usage, usage, "a tvmconv.space.search_space.ResourceUsage")
        return usage

    def apply(self, w: Workload, config: Mapping[str, Value] | None = None) -> tuple[TirSchedule, Knobs]:
        """Schedule a workload.

        Args:
            w: The workload.
            config: Values by knob name; missing knobs take their defaults.

        Returns:
            The TIR schedule that the function transformed or wrote, and the `Knobs` with every value that was used.

        Raises:
            KnobError: A knob does not exist, does not accept its value, or TVM cannot schedule the values.
            ScheduleError: TVM cannot schedule the workload with every knob at its default.
            ScheduleFailure: The function or the condition raised another exception, or returned no schedule.
        """
        from tvm.s_tir import Schedule as TirSchedule
        from tvm.s_tir.schedule import ScheduleError as TirScheduleError

        self._meets(self.condition, w)  # `schedules` also lists a schedule whose condition raises; it is reported here
        k = Knobs(compat.rename_requested_config(self.name, config) if isinstance(config, Mapping) else config)
        s = TirSchedule(w.prim_func())
        try:
            with self._guard_user_code():
                returned_schedule = self.function(s, w, k)
        except ScheduleFailure as failure:
            error = failure.__cause__
            if not isinstance(error, TirScheduleError):
                raise
            reason = f"{str(error).strip().splitlines()[-1]} ({failure.location})"
            if config:
                values = " ".join(f"{name}={format_value(value)}" for name, value in k.config.items())
                raise KnobError(f"schedule {self.name} cannot take {values} for {w}: {reason}") from error
            raise ScheduleError(f"schedule {self.name} cannot compute {w}: {reason}") from error
        if not isinstance(returned_schedule, TirSchedule | None):
            raise self._make_return_type_failure(self.function, returned_schedule, "None or a tvm.s_tir.Schedule")
        k.check_unknown_knobs(self.name)
        if returned_schedule is None:
            return s, k
        with self._guard_user_code():
            _check_arguments(returned_schedule, w)
        return returned_schedule, k


def _check_arguments(returned_schedule: TirSchedule, w: Workload) -> None:
    """Raise TypeError unless the function `main` of a schedule takes the arguments of the workload."""
    arguments = [(tuple(map(int, p.shape)), str(p.dtype)) for p in returned_schedule.mod["main"].params]
    expected = list(zip(w.argument_shapes, map(get_tir_dtype, w.argument_dtypes), strict=True))
    if arguments != expected:
        raise TypeError(f"the function that it returned takes {arguments}, expected {expected}")


@functools.lru_cache(maxsize=4096)
def _evaluate_condition(condition: Callable[[Any], bool], w: Workload) -> bool:
    return bool(condition(w))


# Predictions, defaults and searches ask for the same knobs and spaces, which are immutable. A space lists its legal
# configs once; that may take megabytes.
@functools.lru_cache(maxsize=256)
def _declare_knobs(schedule: Schedule, w: Workload) -> Knobs:
    return schedule.apply(w)[1]


@functools.lru_cache(maxsize=64)
def _make_space(schedule: Schedule, w: Workload, limits: BlockLimits) -> Space:
    k = _declare_knobs(schedule, w)

    def guard(predicate: Callable[[Columns], Any], columns: Columns) -> Any:
        with schedule._guard_user_code(predicate):
            return predicate(columns)

    constraints = tuple(
        replace(constraint, predicate=functools.partial(guard, constraint.predicate)) for constraint in k.constraints
    )
    usage = functools.partial(schedule._compute_usage, w) if schedule.usage else None
    return Space(k.declared, constraints, usage, limits)


registered_schedules: dict[tuple[str, str], Schedule] = {}  # by operator and name; `tvmconv.registry` fills it


def _get_registered(operator: str, name: str, function: Callable) -> Schedule:
    """Return a registered schedule; unpickling the argument `function` has imported its module."""
    return registered_schedules[operator, name]
