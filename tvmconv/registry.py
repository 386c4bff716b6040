"""Registry of schedules: which schedules exist, and which workloads each of them can compute.

A schedule is a function `f(s, w, k)` of an `s_tir.Schedule`, a workload and a `Knobs` object. It is registered by the
decorator `@schedule(operator, …)` and has a file of its own. Packages with such files are found through the entry-point
group `tvmconv.schedules` and the environment variable `TVMCONV_SCHEDULES`; the built-in package is always registered.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import inspect
import itertools
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tvmconv import compat
from tvmconv.errors import Error, HostError, KnobError, ScheduleError, ScheduleFailure, describe_error, log_traceback
from tvmconv.html import make_html_details
from tvmconv.requirements import describe_unmet
from tvmconv.space import Columns, Config, Knobs, Value, format_value, suggest_name
from tvmconv.space.search_space import ANY_GPU, ResourceUsage, Space
from tvmconv.target import BlockLimits, parse_arch_number
from tvmconv.user_code import BUILT_IN, translate_user_errors
from tvmconv.workloads.epilogue import STATS
from tvmconv.workloads.registry import as_workload
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from tvm.s_tir import Schedule as TirSchedule

    from tvmconv.workloads import Workload

ENTRY_POINT_GROUP = "tvmconv.schedules"
SCHEDULES_VARIABLE = "TVMCONV_SCHEDULES"  # names of modules, with commas between them
DEVICE_KINDS = ("cuda", "opencl")

_logger = logging.getLogger("tvmconv")

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

    Examples:
        >>> import tvmconv as tc
        >>> w = tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1")
        >>> tiling = next(schedule for schedule in tc.schedules(w) if schedule.name == "tiling")
        >>> tiling.is_applicable(w), tiling.is_searched_by_default(w), tiling.is_deferred(w)
        (True, False, False)
        >>> tiling.can_run_on("cuda", "sm_90")
        True
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

    def __repr__(self) -> str:
        return f"<Schedule {self.name} of {self.operator}>"

    def _repr_html_(self) -> str:
        return make_html_details(f"{self.name}: {self.summary}", self.doc)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle a registered schedule by its name and function, because its other functions may not be picklable."""
        if _registry.get((self.operator, self.name)) is self:
            return _get_registered, (self.operator, self.name, self.function)
        return super().__reduce__()

    def is_applicable(self, w: Workload) -> bool:
        """Return whether the schedule can compute the workload.

        Args:
            w: Workload of any operator.

        Raises:
            ScheduleFailure: The condition of the schedule raises an exception.
        """
        if w.operator != self.operator or w.dtype not in self.dtypes or self._lacks_stats(w):
            return False
        return self._meets(self.condition, w, default=True)

    def _lacks_stats(self, w: Workload) -> bool:
        return STATS in w.epilogue and not self.computes_stats

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
            >>> w = tc.parse("conv2d:32x128x40x40,128x128x3x3,s1,p1,f16,nhwc")
            >>> configs = find_schedule(w, "hopper").list_starting_configs(w)
            >>> [config["kernel_schedule"] for config in configs][:3]
            ['pingpong', 'cooperative', 'pingpong']
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
        is_alone = len({s.name for s in _registry.values() if s.function.__module__ == module}) <= 1
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
            The knobs that the schedule declares, its constraints, and the resources of each config.

        Raises:
            ScheduleError: As `apply`. Methods of the space raise `ScheduleFailure` if `usage` or a constraint raises.
        """
        k = self.apply(w)[1]

        def guard(predicate: Callable[[Columns], Any], columns: Columns) -> Any:
            with self._guard_user_code(predicate):
                return predicate(columns)

        constraints = tuple(
            replace(constraint, predicate=functools.partial(guard, constraint.predicate))
            for constraint in k.constraints
        )
        return Space(k.declared, constraints, functools.partial(self._compute_usage, w) if self.usage else None, limits)

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
    expected = list(zip(w.argument_shapes, w.argument_dtypes, strict=True))
    if arguments != expected:
        raise TypeError(f"the function that it returned takes {arguments}, expected {expected}")


@functools.lru_cache(maxsize=4096)
def _evaluate_condition(condition: Callable[[Any], bool], w: Workload) -> bool:
    return bool(condition(w))


_registry: dict[tuple[str, str], Schedule] = {}


def schedule(
    operator: str,
    *more_operators: str,
    dtypes: tuple[str, ...] = ("float32",),
    usage: Callable[[Any, Columns], ResourceUsage] | None = None,
    condition: Callable[[Any], bool] | None = None,
    search_if: Callable[[Any], bool] | None = None,
    starting_configs: Callable[[Any], Sequence[Mapping[str, Value]]] | None = None,
    supersedes: tuple[str, ...] = (),
    defers_when: Callable[[Any], bool] | None = None,
    estimate_seconds: Callable[[Any], float] | None = None,
    device_kinds: tuple[str, ...] = DEVICE_KINDS,
    baseline: bool = False,
    min_arch: int = 0,
    exact_arch: int = 0,
    computes_stats: bool = False,
) -> Callable[[Callable], Callable]:
    """Register a function `f(s, w, k)` as a schedule of one or several operators, named after the function.

    Args:
        operator: Operator whose workloads it computes.
        more_operators: Further operators.
        dtypes: Dtypes that it supports.
        usage: `f(w, columns)`, which computes the `ResourceUsage` of many configs. With it, a search never builds
            configs that exceed the device's limits.
        condition: `f(w)`, which returns whether the schedule supports a workload. A `Requirement`
            (tvmconv.requirements), or a function whose docstring begins with "Whether", explains itself in messages.
        search_if: `f(w)`, which returns whether a search tries the schedule when none is named.
        starting_configs: `f(w)`, which returns the configs that a search tries after the default, the most promising
            first. Each may lack knobs; a config that is not legal is replaced by a legal neighbor.
        supersedes: Names of schedules that a search skips when it tries this one.
        defers_when: `f(w)`, which returns whether other searched schedules come first; None for never.
        estimate_seconds: `f(w)`, which returns the estimated seconds of a good config on the GPU of the fit. It is for
            schedules whose `usage` estimates no time, and decides whether their default kernel is worth a build.
        device_kinds: Kinds of devices that it supports.
        baseline: Whether speed-ups are relative to this schedule; an operator has at most one baseline.
        min_arch: Lowest NVIDIA architecture that it supports: 80 for sm_80.
        exact_arch: The only NVIDIA architecture that it supports: 90 for sm_90, which alone has wgmma.
        computes_stats: Whether it computes the epilogue operation `stats`, where its condition holds.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ScheduleError: The operator already has another schedule of that name, or another baseline.

    Examples:
        >>> import tvmconv as tc
        >>> @tc.schedule("conv2d", dtypes=("float32", "float16"))  # doctest: +SKIP
        ... def inlined(s, w, k):
        ...     s.compute_inline("padded")
    """

    def register_function(function: Callable) -> Callable:
        name = function.__name__
        operators = [op for op in (operator, *more_operators) if not _is_registered_from_same_file(op, function)]
        for registered in _registry.values():
            if baseline and registered.baseline and registered.operator in operators and registered.name != name:
                raise ScheduleError(
                    f"{registered.operator} has two baselines, {registered.name} in {registered.function.__module__} "
                    f"and {name} in {function.__module__}; expected one"
                )
        for op in operators:
            _registry[op, name] = Schedule(
                name,
                op,
                function,
                dtypes,
                len(_registry),
                usage,
                condition,
                search_if,
                starting_configs,
                supersedes,
                defers_when,
                estimate_seconds,
                device_kinds,
                baseline,
                min_arch,
                exact_arch,
                computes_stats,
            )
        return function

    return register_function


def _get_registered(operator: str, name: str, function: Callable) -> Schedule:
    """Return a registered schedule; unpickling the argument `function` has imported its module."""
    return _registry[operator, name]


def _is_registered_from_same_file(operator: str, function: Callable) -> bool:
    """Return whether a file already registered the schedule under another module name; raise if it is another file."""
    name, module = function.__name__, function.__module__
    registered = _registry.get((operator, name))
    if registered is None or registered.function.__module__ == module:
        return False
    if _get_source_path(registered.function) != _get_source_path(function):
        raise ScheduleError(
            f"schedule {name} of {operator} is defined in {registered.function.__module__} and {module}"
        )
    return True


def _get_source_path(function: Callable) -> str:
    return os.path.realpath(function.__code__.co_filename)


@functools.cache
def _load_schedule_packages() -> dict[str, Error]:
    """Import every module of every package of schedules, the built-in package first, which registers the schedules. The
    result is the error of each other package that does not import, by name; it is also logged in one line.
    """
    try:
        _import_package(BUILT_IN)
    except (ImportError, AttributeError, MemoryError, OSError) as error:
        raise HostError(f"the schedules cannot be imported; is there enough memory? {describe_error(error)}") from error
    import_errors: dict[str, Error] = {}
    for name in _list_schedule_packages():
        try:
            with translate_user_errors(f"package {name} of schedules", name):
                _import_package(name)
        except Error as error:
            import_errors[name] = error
            _logger.warning("%s", error if isinstance(error, ScheduleFailure) else f"package {name}: {error}")
            log_traceback(error)
    return import_errors


def _list_schedule_packages() -> list[str]:
    """Return the names of the packages and modules of schedules: those of entry points, and those that
    `$TVMCONV_SCHEDULES` lists, which may also be in the current folder.
    """
    installed = [entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)]
    listed = [name.strip() for name in os.environ.get(SCHEDULES_VARIABLE, "").split(",") if name.strip()]
    if listed and (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)  # builders get this path; at the end, where it hides no installed module
    return list(dict.fromkeys(installed + listed))


def _import_package(name: str) -> None:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", ()), prefix=f"{name}."):
        importlib.import_module(module.name)


def schedules(workload: Workload | str | None = None) -> list[Schedule]:
    """Return the schedules of a workload, or all schedules, sorted by operator.

    Built-in schedules come first, the simplest one first; then those of other packages by package, file and line. A
    schedule whose condition raises an exception is listed; using it raises `ScheduleFailure`. A package that does not
    import is logged as one warning on the logger `tvmconv`, and its schedules are missing.

    Args:
        workload: A workload or its text; None for the schedules of all operators.

    Returns:
        The schedules, in a stable order.

    Raises:
        WorkloadError: The text is malformed.

    Examples:
        >>> [s.name for s in schedules("conv2d:1x64x56x56,64x64x3x3,s1,p1")][:2]
        ['default', 'tiling']
    """
    _load_schedule_packages()
    w = None if workload is None else as_workload(workload)
    return sorted((s for s in _registry.values() if w is None or _is_applicable_or_failing(s, w)), key=_listing_order)


def _is_applicable_or_failing(s: Schedule, w: Workload) -> bool:
    """Return whether a schedule applies or its condition raises; the exception is reported when it is used."""
    try:
        return s.is_applicable(w)
    except ScheduleFailure:
        return True


def _listing_order(s: Schedule) -> tuple[Any, ...]:
    """Return the sort key of `schedules`, which does not depend on the import order of other packages."""
    module = s.function.__module__
    if module.startswith(f"{BUILT_IN}."):
        return s.operator, False, s.order  # each `__init__` imports its schedules from the simplest to the fastest
    return s.operator, True, module, s.function.__code__.co_firstlineno


def get_baseline_schedule(w: Workload) -> Schedule | None:
    """Return the baseline among a workload's schedules, which speed-ups are relative to; None if there is none."""
    return next((s for s in schedules(w) if s.baseline), None)


def find_schedule(w: Workload, name: str) -> Schedule:
    """Return the schedule of a workload by its name.

    Examples:
        >>> import tvmconv
        >>> find_schedule(tvmconv.parse("conv2d:1x64x56x56,64x64x3x3,s1,p1"), "tiling").operator
        'conv2d'
    """
    import_errors = _load_schedule_packages()
    registered = _registry.get((w.operator, name))
    if registered and _is_applicable_or_failing(registered, w):
        return registered
    if registered and w.dtype not in registered.dtypes:
        dtypes = ", ".join(registered.dtypes)
        raise ScheduleError(f"{name} computes {w.operator} in {dtypes}; this workload has {w.dtype}")
    if registered and registered._lacks_stats(w):
        raise ScheduleError(f"{name} does not compute the epilogue operation {STATS}")
    if registered:
        assert registered.condition
        raise ScheduleError(f"{name} computes {w.operator} in {w.dtype}{describe_unmet(registered.condition, w)}")
    names = [s.name for s in schedules(w)]
    reason = f"no schedule {name!r} for {w.operator} in {w.dtype}{suggest_name(name, names)}"
    hint = f"one of your own is found if {SCHEDULES_VARIABLE} names its module (docs/extending.md)"
    parts = [reason, f"there are: {', '.join(names) or 'none'}", hint, *map(str, import_errors.values())]
    raise ScheduleError("; ".join(parts))


def as_schedule(w: Workload, schedule: str | Schedule) -> Schedule:
    """Return a schedule unchanged, or find it by its name."""
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        raise ScheduleError(f"expected a schedule or its name, such as 'tiling', not {quote(schedule)}")
    return find_schedule(w, schedule)


def low_priority_schedules(w: Workload, kind: str, arch: str | None = None) -> list[Schedule]:
    """Return the schedules that a search tries with low priority, after those of `schedules_to_tune`."""
    primary = schedules_to_tune(w, kind, arch)
    superseded = {name for s in primary for name in s.supersedes}
    candidates = [s for s in _list_working_schedules(w, kind, arch) if not s.baseline and s.name not in superseded]
    return [s for s in reversed(candidates) if s not in primary]  # the last ones are usually the fastest


def schedules_to_tune(w: Workload, kind: str, arch: str | None = None) -> list[Schedule]:
    """Return the schedules that a search tries by default; the first is built if no tuning data is available."""
    candidates = [s for s in _list_working_schedules(w, kind, arch) if s.is_searched_by_default(w)]
    superseded = {name for s in candidates for name in s.supersedes}
    remaining = [s for s in candidates if s.name not in superseded]
    if not remaining:
        raise ScheduleError(f"no schedule of {w} is searched by default on {arch or kind}: name one")
    return sorted(remaining, key=lambda s: s.is_deferred(w))


def _list_working_schedules(w: Workload, kind: str, arch: str | None) -> list[Schedule]:
    """Return the schedules for a workload and a device, except those whose conditions raise an exception."""
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
    """Log a warning, once for each message, that an activity continues without a failed schedule."""
    message = f"{failure}; {activity} goes on without it"
    if message not in _reported_messages:
        _reported_messages.add(message)
        _logger.warning("%s", message)
        log_traceback(failure)


_reported_messages: set[str] = set()  # messages that this process has logged
