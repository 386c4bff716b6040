"""The schedule library: what schedules there are, and for which workloads.

A schedule is a function `f(s, w, k)` over an `s_tir.Schedule`, a workload and knobs, in a file of its own, marked with
`@schedule(operator, …)`. Packages of such files are found through the entry-point group `tvmconv.schedules`; the one in
this project is always there.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tvmconv import gpu_specs
from tvmconv.errors import Error, HostError, KnobError, ScheduleError, ScheduleFailure, describe_error, log_traceback
from tvmconv.gpu_specs import BlockLimits
from tvmconv.requirements import describe_unmet
from tvmconv.space import Columns, Config, Knobs, Value, format_value
from tvmconv.space.search_space import ANY_GPU, ResourceUsage, Space
from tvmconv.user_code import BUILT_IN, translate_user_errors
from tvmconv.workloads.registry import as_workload
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from tvm.s_tir import Schedule as TirSchedule

    from tvmconv.workloads import Workload

ENTRY_POINT_GROUP = "tvmconv.schedules"
DEVICE_KINDS = ("cuda", "opencl")  # of devices

_logger = logging.getLogger("tvmconv")

ScheduleFunction = Callable[["TirSchedule", Any, Knobs], "TirSchedule | None"]


@dataclass(frozen=True)
class Schedule:
    """A named way to compute the workloads of one operator.

    Its functions are anyone's code: whatever they raise, the methods raise as `ScheduleFailure`, in one line with the
    place.

    Attributes:
        name: what the user calls it.
        operator: the workloads that it is for (`conv2d`).
        function: `f(s, w, k)`, which asks `k` for its choices, and transforms `s` in place or returns the schedule of a
            function of the same arguments that it wrote itself, for what tensor expressions cannot say.
        dtypes: the dtypes that it computes.
        order: its place among those of its package, in the order in which the package imports its files.
        usage: `f(w, columns)`, what configs use of a device, as a formula over their values; None if there is none.
        condition: `f(w)`, whether it is for a workload of its operator and dtypes; None for all. A `Requirement`
            (tvmconv.requirements) says in error messages what it needs.
        search_if: for which of these a search should try it when none is named; None for none.
        supersedes: names of schedules that a search need not try where this one is promising and runs.
        defers_when: for which workloads others that promise something come first, where they run; None for none.
        device_kinds: the kinds of devices that its kernels run on.
        baseline: whether speed-ups are over it, for the workloads of its operator that it computes.
        min_arch: number of the first NVIDIA architecture that has what its kernels need, 80 for sm_80; 0 for any.
        exact_arch: number of the only one that has it, 90 for sm_90; 0 for none such.
    """

    name: str
    operator: str
    function: ScheduleFunction = field(repr=False)
    dtypes: tuple[str, ...]
    order: int
    usage: Callable[[Any, Columns], ResourceUsage] | None = field(default=None, repr=False)
    condition: Callable[[Any], bool] | None = field(default=None, repr=False)
    search_if: Callable[[Any], bool] | None = field(default=None, repr=False)
    supersedes: tuple[str, ...] = ()
    defers_when: Callable[[Any], bool] | None = field(default=None, repr=False)
    device_kinds: tuple[str, ...] = DEVICE_KINDS
    baseline: bool = False
    min_arch: int = 0
    exact_arch: int = 0

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle it by its function, as functions are by their names: what else it has need not be of a module."""
        if _registry.get((self.operator, self.name)) is self:
            return _get_registered, (self.operator, self.name, self.function)
        return super().__reduce__()

    def is_applicable(self, w: Workload) -> bool:
        """Whether it can compute the workload.

        Raises:
            ScheduleFailure: its condition raises an exception.
        """
        return w.operator == self.operator and w.dtype in self.dtypes and self._meets_condition(w)

    def is_searched_by_default(self, w: Workload) -> bool:
        """Whether a search that names no schedule should try it; raises `ScheduleFailure` as `is_applicable` does."""
        with self._guard_user_code(self.search_if):
            return bool(self.search_if and _evaluate_condition(self.search_if, w))

    def is_deferred(self, w: Workload) -> bool:
        """Whether other promising schedules come before it; raises `ScheduleFailure` as `is_applicable` does."""
        with self._guard_user_code(self.defers_when):
            return bool(self.defers_when and _evaluate_condition(self.defers_when, w))

    def _meets_condition(self, w: Workload) -> bool:
        if self.condition is None:
            return True
        with self._guard_user_code(self.condition):
            return _evaluate_condition(self.condition, w)

    def _guard_user_code(self, function: Callable | None = None) -> AbstractContextManager[None]:
        """The border to the schedule's function, or to another one of its functions."""
        modules = [getattr(code_object, "__module__", None) for code_object in (self.function, function)]
        return translate_user_errors(f"schedule {self.name}", *filter(None, modules))

    def _make_return_type_failure(
        self, user_function: Callable, return_value: object, expected: str
    ) -> ScheduleFailure:
        reason = (
            f"{getattr(user_function, '__name__', 'it')} returned {type(return_value).__name__}, expected {expected}"
        )
        code = getattr(inspect.unwrap(user_function), "__code__", None)
        location = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code else ""
        return ScheduleFailure(f"schedule {self.name}", reason, location)

    def can_run_on(self, kind: str, arch: str | None = None) -> bool:
        """Whether it is for devices of a kind, and of an NVIDIA architecture such as "sm_90" if one is given."""
        if kind not in self.device_kinds or arch is None:
            return kind in self.device_kinds
        return (
            gpu_specs.parse_arch_number(arch) == self.exact_arch
            if self.exact_arch
            else gpu_specs.parse_arch_number(arch) >= self.min_arch
        )

    def check_runs_on(self, kind: str, arch: str | None, device: str) -> None:
        """Raise ScheduleError unless `can_run_on`; `device` is what the message calls it."""
        if kind not in self.device_kinds:
            raise ScheduleError(f"schedule {self.name} is for {' and '.join(self.device_kinds)}, not for {device}")
        if not self.can_run_on(kind, arch):
            device_label = device if arch == device else f"{device}, which is {arch}"
            required_arch = f"sm_{self.exact_arch}" if self.exact_arch else f"sm_{self.min_arch} or later"
            raise ScheduleError(f"schedule {self.name} needs {required_arch}, and is not for {device_label}")

    @property
    def doc(self) -> str:
        """What the schedule does and why, in full: the docstring of its file."""
        module = inspect.getmodule(self.function)
        if module is None:
            return ""
        if doc := inspect.getdoc(module):
            return doc
        try:  # with PYTHONOPTIMIZE=2 no module has its docstring, but its file does
            return ast.get_docstring(ast.parse(inspect.getsource(module))) or ""
        except (OSError, SyntaxError):
            return ""

    @property
    def summary(self) -> str:
        """What the schedule does, in one line."""
        return self.doc.partition("\n")[0]

    def space(self, w: Workload, limits: BlockLimits = ANY_GPU) -> Space:
        """The configs of this schedule for `w`.

        Args:
            w: the workload.
            limits: what a config may use of a device, if the schedule says what it uses.

        Raises:
            ScheduleError: as `apply`. The space raises `ScheduleFailure` where `usage` or a knob's condition raises.
        """
        k = self.apply(w)[1]
        constraints = tuple(
            replace(constraint, predicate=functools.partial(self._evaluate_predicate, constraint.predicate))
            for constraint in k.constraints
        )
        return Space(k.declared, constraints, functools.partial(self._compute_usage, w) if self.usage else None, limits)

    def _evaluate_predicate(self, predicate: Callable[[Columns], Any], columns: Columns) -> Any:
        """A knobs' condition, for the values of many configs."""
        with self._guard_user_code(predicate):
            return predicate(columns)

    def _compute_usage(self, w: Workload, columns: Columns) -> ResourceUsage:
        assert self.usage
        with self._guard_user_code(self.usage):
            usage = self.usage(w, columns)
        if not isinstance(usage, ResourceUsage):
            raise self._make_return_type_failure(self.usage, usage, "a tvmconv.space.search_space.ResourceUsage")
        return usage

    def apply(self, w: Workload, config: Mapping[str, Value] | None = None) -> tuple[TirSchedule, Knobs]:
        """Schedule `w`.

        Args:
            w: the workload.
            config: values by knob name; the others take their defaults.

        Returns:
            The TIR schedule, transformed or written by the function, and the knobs with every choice that was made.

        Raises:
            KnobError: a value is none that the knob takes, no such knob exists, or TVM cannot schedule the values.
            ScheduleError: TVM cannot schedule the workload this way, with every knob at its default.
            ScheduleFailure: the function or the condition raises another exception, or returns no schedule.
        """
        from tvm.s_tir import Schedule as TirSchedule
        from tvm.s_tir.schedule import ScheduleError as TirScheduleError

        self._meets_condition(w)  # one that raises is not reported before: `schedules` lists what may apply
        k = Knobs(config)
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
                raise KnobError(
                    f"schedule {self.name} cannot take {_format_config(k.config)} for {w}: {reason}"
                ) from error
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
    """Raise TypeError unless a schedule's function `main` takes the arguments of a workload."""
    arguments = [(tuple(map(int, p.shape)), str(p.dtype)) for p in returned_schedule.mod["main"].params]
    expected = list(zip(w.argument_shapes, w.argument_dtypes, strict=True))
    if arguments != expected:
        raise TypeError(f"the function that it returned takes {arguments}, expected {expected}")


@functools.lru_cache(maxsize=4096)
def _evaluate_condition(condition: Callable[[Any], bool], w: Workload) -> bool:
    return bool(condition(w))


def _format_config(config: Config) -> str:
    return " ".join(f"{name}={format_value(value)}" for name, value in config.items())


_registry: dict[tuple[str, str], Schedule] = {}


def schedule(
    operator: str,
    *more_operators: str,
    dtypes: tuple[str, ...] = ("float32",),
    usage: Callable[[Any, Columns], ResourceUsage] | None = None,
    condition: Callable[[Any], bool] | None = None,
    search_if: Callable[[Any], bool] | None = None,
    supersedes: tuple[str, ...] = (),
    defers_when: Callable[[Any], bool] | None = None,
    device_kinds: tuple[str, ...] = DEVICE_KINDS,
    baseline: bool = False,
    min_arch: int = 0,
    exact_arch: int = 0,
) -> Callable[[Callable], Callable]:
    """Mark `f(s, w, k)` as a schedule for one or several operators, named after the function.

    Args:
        operator: the workloads that it is for.
        more_operators: more of them.
        dtypes: the dtypes that it computes.
        usage: `f(w, columns)`, what configs use of a device, as a formula over their values; with it, configs that use
            too much are never built.
        condition: `f(w)`, whether it is for a workload, if not for all. A `Requirement` (tvmconv.requirements) or a
            function whose docstring begins with "Whether" says in error messages what it needs.
        search_if: for which of these a search should try it when none is named.
        supersedes: names of schedules that a search need not try where this one is promising and runs.
        defers_when: for which workloads others that promise something come first, where they run; None for none.
        device_kinds: the kinds of devices that its kernels run on.
        baseline: whether speed-ups are over it; an operator has one such schedule.
        min_arch: the first NVIDIA architecture that has what its kernels need: 80 for sm_80.
        exact_arch: in place of `min_arch`, the only one: 90 for sm_90, whose wgmma no other has.

    Raises:
        ScheduleError: an operator already has another schedule of that name, or another baseline.
    """

    def register_function(function: Callable) -> Callable:
        name = function.__name__
        new_operators = [
            registered_operator
            for registered_operator in (operator, *more_operators)
            if not _is_registered_from_same_file(registered_operator, function)
        ]
        if baseline:
            for registered_operator in new_operators:
                _check_single_baseline(registered_operator, function)
        for registered_operator in new_operators:
            _registry[registered_operator, name] = Schedule(
                name,
                registered_operator,
                function,
                dtypes,
                len(_registry),
                usage,
                condition,
                search_if,
                supersedes,
                defers_when,
                device_kinds,
                baseline,
                min_arch,
                exact_arch,
            )
        return function

    return register_function


def _get_registered(operator: str, name: str, function: Callable) -> Schedule:
    """The schedule of a name; that its function is an argument has imported its module."""
    return _registry[operator, name]


def _is_registered_from_same_file(operator: str, function: Callable) -> bool:
    """Whether the operator has this schedule from the same file under another name.

    Raises:
        ScheduleError: it has another schedule of that name.
    """
    name, module = function.__name__, function.__module__
    registered = _registry.get((operator, name))
    if registered is None or registered.function.__module__ == module:
        return False
    if _get_source_path(registered.function) != _get_source_path(function):
        raise ScheduleError(
            f"schedule {name} of {operator} is defined in {registered.function.__module__} and {module}"
        )
    return True


def _check_single_baseline(operator: str, function: Callable) -> None:
    """Raise ScheduleError if another schedule of the operator is its baseline."""
    name, module = function.__name__, function.__module__
    for registered in _registry.values():
        if registered.operator == operator and registered.baseline and registered.name != name:
            raise ScheduleError(
                f"{operator} has two baselines, {registered.name} in {registered.function.__module__} "
                f"and {name} in {module}: "
                "one is enough"
            )


def _get_source_path(function: Callable) -> str:
    return os.path.realpath(function.__code__.co_filename)


@functools.cache
def _load_schedule_packages() -> dict[str, Error]:
    """Import every module of every package of schedules, the project's own first; importing them registers them.

    Returns:
        Why packages of others do not import, by their names; each is also one line of the log.

    Raises:
        HostError: the project's own package does not import, as where TVM finds too little memory to load.
    """
    try:
        _import_package(BUILT_IN)
    except (ImportError, AttributeError, MemoryError, OSError) as error:
        raise HostError(f"the schedules cannot be imported; is there enough memory? {describe_error(error)}") from error
    import_errors: dict[str, Error] = {}
    for name in dict.fromkeys(entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)):
        try:
            with translate_user_errors(f"package {name} of schedules", name):
                _import_package(name)
        except Error as error:
            import_errors[name] = error
            _logger.warning("%s", error if isinstance(error, ScheduleFailure) else f"package {name}: {error}")
            log_traceback(error)
    return import_errors


def _import_package(name: str) -> None:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", ()), prefix=f"{name}."):
        importlib.import_module(module.name)


def schedules(workload: Workload | str | None = None) -> list[Schedule]:
    """Return the schedules of a workload, or all there are, by operator.

    First come the project's own, the simplest first; then all others by package, file and line. A schedule whose
    condition raises an exception is among them, and raises it as `ScheduleFailure` where it is used. A package of
    others that does not import is one warning in the log `tvmconv`, and its schedules are missing.

    Args:
        workload: a workload or its text.

    Raises:
        WorkloadError: the text is malformed.

    Example:
        >>> [s.name for s in schedules("conv2d:1x64x56x56,64x64x3x3,s1,p1")][:2]
        ['default', 'tiling']
    """
    _load_schedule_packages()
    w = None if workload is None else as_workload(workload)
    return sorted((s for s in _registry.values() if w is None or _is_applicable_or_failing(s, w)), key=_listing_order)


def _is_applicable_or_failing(s: Schedule, w: Workload) -> bool:
    """Whether a schedule applies, or raises an exception when asked, which is reported where it is used."""
    try:
        return s.is_applicable(w)
    except ScheduleFailure:
        return True


def _listing_order(s: Schedule) -> tuple[Any, ...]:
    """What schedules are listed by; when they were imported is of no account."""
    module = s.function.__module__
    if module.startswith(f"{BUILT_IN}."):
        return s.operator, False, s.order  # each folder's `__init__` imports its files in the order of the ladder
    return s.operator, True, module, s.function.__code__.co_firstlineno


def get_baseline_schedule(w: Workload) -> Schedule | None:
    """The baseline among the schedules of a workload, which speed-ups are over; None where none of them is."""
    return next((s for s in schedules(w) if s.baseline), None)


def find_schedule(w: Workload, name: str) -> Schedule:
    """Return the schedule of that name for a workload.

    Raises:
        ScheduleError: there is none, or it does not apply to the workload; the message says which condition is not met.
    """
    import_errors = _load_schedule_packages()
    registered = _registry.get((w.operator, name))
    if registered and _is_applicable_or_failing(registered, w):
        return registered
    if registered:
        raise ScheduleError(_explain_inapplicable(registered, w))
    available_names = ", ".join(s.name for s in schedules(w)) or "none"
    reason = f"no schedule {name!r} for {w.operator} in {w.dtype}"
    raise ScheduleError("; ".join([reason, f"there are: {available_names}", *map(str, import_errors.values())]))


def as_schedule(w: Workload, schedule: str | Schedule) -> Schedule:
    """Return a schedule as it is, or find it by its name; raises `ScheduleError` as `find_schedule`, or for anything
    else.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        raise ScheduleError(f"expected a schedule or its name, such as 'tiling', not {quote(schedule)}")
    return find_schedule(w, schedule)


def _explain_inapplicable(s: Schedule, w: Workload) -> str:
    """Say what a workload of a schedule's operator lacks for the schedule to apply."""
    if w.dtype not in s.dtypes:
        return f"{s.name} computes {s.operator} in {', '.join(s.dtypes)}; this workload has {w.dtype}"
    assert s.condition
    return f"{s.name} computes {s.operator} in {w.dtype}{describe_unmet(s.condition, w)}"


def low_priority_schedules(w: Workload, kind: str, arch: str | None = None) -> list[Schedule]:
    """The schedules that a search which names none tries beside those of `schedules_to_tune`, as they seldom win.

    Args:
        w: the workload.
        kind: of the device.
        arch: its NVIDIA architecture; None for any.
    """
    primary = schedules_to_tune(w, kind, arch)
    superseded = {name for s in primary for name in s.supersedes}
    candidates = [s for s in _list_working_schedules(w, kind, arch) if not s.baseline and s.name not in superseded]
    return [s for s in reversed(candidates) if s not in primary]  # the last ones are mostly the fastest


def schedules_to_tune(w: Workload, kind: str, arch: str | None = None) -> list[Schedule]:
    """The schedules whose spaces are searched if none is named, at least one; the first is built if nothing is known.

    Args:
        w: the workload.
        kind: of the device.
        arch: its NVIDIA architecture; None for any.

    Raises:
        ScheduleError: there is none.
    """
    candidates = [s for s in _list_working_schedules(w, kind, arch) if s.is_searched_by_default(w)]
    superseded = {name for s in candidates for name in s.supersedes}
    remaining = [s for s in candidates if s.name not in superseded]
    if not remaining:
        raise ScheduleError(f"no schedule of {w} is made to be tuned on {arch or kind}: name one")
    return sorted(remaining, key=lambda s: s.is_deferred(w))


def _list_working_schedules(w: Workload, kind: str, arch: str | None) -> list[Schedule]:
    """The schedules for a workload and a device, without those whose own code raises when asked what they are for."""
    working_schedules = []
    for s in schedules(w):
        if not s.can_run_on(kind, arch):
            continue
        try:
            _ = s.is_applicable(w), s.is_searched_by_default(w) and s.is_deferred(w)
        except ScheduleFailure as failure:
            report_skipped_schedule(failure)
            continue
        working_schedules.append(s)
    return working_schedules


def report_skipped_schedule(failure: ScheduleError, activity: str = "the search") -> None:
    """Log, once for each failure, that something goes on without a schedule that failed.

    Args:
        failure: what the schedule's code raised, or why TVM cannot schedule the workload that way.
        activity: what goes on, for the message.
    """
    message = f"{failure}; {activity} goes on without it"
    if message not in _reported_messages:
        _reported_messages.add(message)
        _logger.warning("%s", message)
        log_traceback(failure)


_reported_messages: set[str] = set()  # messages of this process
