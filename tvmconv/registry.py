"""Registry of schedules: which schedules exist, and which workloads each of them can compute.

A schedule is a function `f(s, w, k)` of an `s_tir.Schedule`, a workload and a `Knobs` object. It is registered by the
decorator `@schedule(operator, …)` and has a file of its own. Packages with such files are found through the entry-point
group `tvmconv.schedules` and the environment variable `TVMCONV_SCHEDULES`; the built-in package is always registered.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tvmconv.errors import Error, HostError, ScheduleError, ScheduleFailure, describe_error, log_traceback
from tvmconv.requirements import describe_unmet
from tvmconv.schedule_definition import DEVICE_KINDS, Schedule, registered_schedules
from tvmconv.space import Columns, Value, suggest_name
from tvmconv.space.search_space import ResourceUsage
from tvmconv.user_code import BUILT_IN, translate_user_errors
from tvmconv.workloads.epilogue import STATS
from tvmconv.workloads.features import DESCRIPTIONS
from tvmconv.workloads.registry import as_workload
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from tvmconv.workloads import Workload

ENTRY_POINT_GROUP = "tvmconv.schedules"
SCHEDULES_VARIABLE = "TVMCONV_SCHEDULES"  # names of modules, with commas between them

_logger = logging.getLogger("tvmconv")
_loading_lock = threading.RLock()  # the imported modules may use the registry


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
    features: tuple[str, ...] = (),
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
        features: Properties of workloads that it supports, among `tvmconv.workloads.features.ALL_FEATURES`, where its
            condition holds: tensors of more than 2^31 - 1 elements, cached frames, upsampling.

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
        for registered in registered_schedules.values():
            if baseline and registered.baseline and registered.operator in operators and registered.name != name:
                raise ScheduleError(
                    f"{registered.operator} has two baselines, {registered.name} in {registered.function.__module__} "
                    f"and {name} in {function.__module__}; expected one"
                )
        for op in operators:
            registered_schedules[op, name] = Schedule(
                name,
                op,
                function,
                dtypes,
                len(registered_schedules),
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
                features,
            )
        return function

    return register_function


def _is_registered_from_same_file(operator: str, function: Callable) -> bool:
    """Return whether a file already registered the schedule under another module name; raise if it is another file."""
    name, module = function.__name__, function.__module__
    registered = registered_schedules.get((operator, name))
    if registered is None or registered.function.__module__ == module:
        return False
    if _get_source_path(registered.function) != _get_source_path(function):
        raise ScheduleError(
            f"schedule {name} of {operator} is defined in {registered.function.__module__} and {module}"
        )
    return True


def _get_source_path(function: Callable) -> str:
    return os.path.realpath(function.__code__.co_filename)


def _wait_for_schedule_packages() -> dict[str, Error]:
    """Import the packages of schedules, or wait for the thread that does; return the errors of those that do not."""
    with _loading_lock:
        return _load_schedule_packages()


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
    _wait_for_schedule_packages()
    w = None if workload is None else as_workload(workload)
    return sorted(
        (s for s in registered_schedules.values() if w is None or _is_applicable_or_failing(s, w)), key=_listing_order
    )


def is_computable(workload: Workload, kind: str, arch: str | None = None) -> bool:
    """Return whether a schedule for a kind of device and an architecture computes a workload.

    This is faster than `schedules`, which evaluates the conditions of all schedules.
    """
    return any(
        _is_applicable_or_failing(each, workload)
        for each in schedules()
        if each.operator == workload.operator and each.can_run_on(kind, arch)
    )


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
    import_errors = _wait_for_schedule_packages()
    registered = registered_schedules.get((w.operator, name))
    if registered and _is_applicable_or_failing(registered, w):
        return registered
    if registered and w.dtype not in registered.dtypes:
        dtypes = ", ".join(registered.dtypes)
        raise ScheduleError(f"{name} computes {w.operator} in {dtypes}; this workload has {w.dtype}")
    if registered and registered.lacks_stats(w):
        raise ScheduleError(f"{name} does not compute the epilogue operation {STATS}")
    if registered and (feature := registered.find_missing_feature(w)):
        raise ScheduleError(f"{name} does not support {DESCRIPTIONS[feature]}")
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
