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

from tvmconv import gpu
from tvmconv.errors import Error, HostError, KnobError, ScheduleError, ScheduleFailure, describe, log_traceback
from tvmconv.gpu import Limits
from tvmconv.knobs import Columns, Config, Knobs, Value, format_value
from tvmconv.knobs.space import ANY_GPU, Space, Usage
from tvmconv.requirements import describe_unmet
from tvmconv.user_code import BUILT_IN, user_code
from tvmconv.workloads.registry import as_workload
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from tvm.s_tir import Schedule as TirSchedule

    from tvmconv.workloads import Workload

ENTRY_POINTS = "tvmconv.schedules"
KINDS = ("cuda", "opencl")  # of devices

_logger = logging.getLogger("tvmconv")

Function = Callable[["TirSchedule", Any, Knobs], "TirSchedule | None"]


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
        rank: its place among those of its package, in the order in which the package imports its files.
        usage: `f(w, columns)`, what configs use of a device, as a formula over their values; None if there is none.
        condition: `f(w)`, whether it is for a workload of its operator and dtypes; None for all. A `Requirement`
            (tvmconv.requirements) says in error messages what it needs.
        promising: for which of these a search should try it when none is named; None for none.
        supersedes: names of schedules that a search need not try where this one is promising and runs.
        yields: for which workloads others that promise something come first, where they run; None for none.
        kinds: the kinds of devices that its kernels run on.
        baseline: whether speed-ups are over it, for the workloads of its operator that it computes.
        since: number of the first NVIDIA architecture that has what its kernels need, 80 for sm_80; 0 for any.
        only: number of the only one that has it, 90 for sm_90; 0 for none such.
    """

    name: str
    operator: str
    function: Function = field(repr=False)
    dtypes: tuple[str, ...]
    rank: int
    usage: Callable[[Any, Columns], Usage] | None = field(default=None, repr=False)
    condition: Callable[[Any], bool] | None = field(default=None, repr=False)
    promising: Callable[[Any], bool] | None = field(default=None, repr=False)
    supersedes: tuple[str, ...] = ()
    yields: Callable[[Any], bool] | None = field(default=None, repr=False)
    kinds: tuple[str, ...] = KINDS
    baseline: bool = False
    since: int = 0
    only: int = 0

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle it by its function, as functions are by their names: what else it has need not be of a module."""
        if _registry.get((self.operator, self.name)) is self:
            return _registered, (self.operator, self.name, self.function)
        return super().__reduce__()

    def applies(self, w: Workload) -> bool:
        """Whether it can compute the workload.

        Raises:
            ScheduleFailure: its condition raises an exception.
        """
        return w.operator == self.operator and w.dtype in self.dtypes and self._meets_condition(w)

    def promises(self, w: Workload) -> bool:
        """Whether a search that names no schedule should try it; raises `ScheduleFailure` as `applies` does."""
        with self._own_code(self.promising):
            return bool(self.promising and _holds(self.promising, w))

    def yields_to_others(self, w: Workload) -> bool:
        """Whether other promising schedules come before it; raises `ScheduleFailure` as `applies` does."""
        with self._own_code(self.yields):
            return bool(self.yields and _holds(self.yields, w))

    def _meets_condition(self, w: Workload) -> bool:
        if self.condition is None:
            return True
        with self._own_code(self.condition):
            return _holds(self.condition, w)

    def _own_code(self, function: Callable | None = None) -> AbstractContextManager[None]:
        """The border to the schedule's function, or to another one of its functions."""
        modules = [getattr(each, "__module__", None) for each in (self.function, function)]
        return user_code(f"schedule {self.name}", *filter(None, modules))

    def _returned_wrongly(self, function: Callable, returned: object, expected: str) -> ScheduleFailure:
        reason = f"{getattr(function, '__name__', 'it')} returned {type(returned).__name__}, expected {expected}"
        code = getattr(inspect.unwrap(function), "__code__", None)
        where = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code else ""
        return ScheduleFailure(f"schedule {self.name}", reason, where)

    def runs_on(self, kind: str, arch: str | None = None) -> bool:
        """Whether it is for devices of a kind, and of an NVIDIA architecture such as "sm_90" if one is given."""
        if kind not in self.kinds or arch is None:
            return kind in self.kinds
        return gpu.number(arch) == self.only if self.only else gpu.number(arch) >= self.since

    def check_runs_on(self, kind: str, arch: str | None, device: str) -> None:
        """Raise ScheduleError unless `runs_on`; `device` is what the message calls it."""
        if kind not in self.kinds:
            raise ScheduleError(f"schedule {self.name} is for {' and '.join(self.kinds)}, not for {device}")
        if not self.runs_on(kind, arch):
            named = device if arch == device else f"{device}, which is {arch}"
            needed = f"sm_{self.only}" if self.only else f"sm_{self.since} or later"
            raise ScheduleError(f"schedule {self.name} needs {needed}, and is not for {named}")

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

    def space(self, w: Workload, limits: Limits = ANY_GPU) -> Space:
        """The configs of this schedule for `w`.

        Args:
            w: the workload.
            limits: what a config may use of a device, if the schedule says what it uses.

        Raises:
            ScheduleError: as `apply`. The space raises `ScheduleFailure` where `usage` or a knob's condition raises.
        """
        k = self.apply(w)[1]
        conditions = tuple(replace(each, holds=functools.partial(self._evaluate, each.holds)) for each in k.conditions)
        return Space(k.asked, conditions, functools.partial(self._used, w) if self.usage else None, limits)

    def _evaluate(self, holds: Callable[[Columns], Any], columns: Columns) -> Any:
        """A knobs' condition, for the values of many configs."""
        with self._own_code(holds):
            return holds(columns)

    def _used(self, w: Workload, columns: Columns) -> Usage:
        assert self.usage
        with self._own_code(self.usage):
            used = self.usage(w, columns)
        if not isinstance(used, Usage):
            raise self._returned_wrongly(self.usage, used, "a tvmconv.knobs.space.Usage")
        return used

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
            with self._own_code():
                written = self.function(s, w, k)
        except ScheduleFailure as failure:
            error = failure.__cause__
            if not isinstance(error, TirScheduleError):
                raise
            reason = f"{str(error).strip().splitlines()[-1]} ({failure.where})"
            if config:
                raise KnobError(f"schedule {self.name} cannot take {_spell(k.config)} for {w}: {reason}") from error
            raise ScheduleError(f"schedule {self.name} cannot compute {w}: {reason}") from error
        if not isinstance(written, TirSchedule | None):
            raise self._returned_wrongly(self.function, written, "None or a tvm.s_tir.Schedule")
        k.check_all_asked(self.name)
        if written is None:
            return s, k
        with self._own_code():
            _check_arguments(written, w)
        return written, k


def _check_arguments(written: TirSchedule, w: Workload) -> None:
    """Raise TypeError unless a schedule's function `main` takes the arguments of a workload."""
    arguments = [(tuple(map(int, p.shape)), str(p.dtype)) for p in written.mod["main"].params]
    expected = list(zip(w.argument_shapes, w.argument_dtypes, strict=True))
    if arguments != expected:
        raise TypeError(f"the function that it returned takes {arguments}, expected {expected}")


@functools.lru_cache(maxsize=4096)
def _holds(condition: Callable[[Any], bool], w: Workload) -> bool:
    return bool(condition(w))


def _spell(config: Config) -> str:
    return " ".join(f"{name}={format_value(value)}" for name, value in config.items())


_registry: dict[tuple[str, str], Schedule] = {}


def schedule(
    operator: str,
    *others: str,
    dtypes: tuple[str, ...] = ("float32",),
    usage: Callable[[Any, Columns], Usage] | None = None,
    condition: Callable[[Any], bool] | None = None,
    promising: Callable[[Any], bool] | None = None,
    supersedes: tuple[str, ...] = (),
    yields: Callable[[Any], bool] | None = None,
    kinds: tuple[str, ...] = KINDS,
    baseline: bool = False,
    since: int = 0,
    only: int = 0,
) -> Callable[[Callable], Callable]:
    """Mark `f(s, w, k)` as a schedule for one or several operators, named after the function.

    Args:
        operator: the workloads that it is for.
        others: more of them.
        dtypes: the dtypes that it computes.
        usage: `f(w, columns)`, what configs use of a device, as a formula over their values; with it, configs that use
            too much are never built.
        condition: `f(w)`, whether it is for a workload, if not for all. A `Requirement` (tvmconv.requirements) or a
            function whose docstring begins with "Whether" says in error messages what it needs.
        promising: for which of these a search should try it when none is named.
        supersedes: names of schedules that a search need not try where this one is promising and runs.
        yields: for which workloads others that promise something come first, where they run; None for none.
        kinds: the kinds of devices that its kernels run on.
        baseline: whether speed-ups are over it; an operator has one such schedule.
        since: the first NVIDIA architecture that has what its kernels need: 80 for sm_80.
        only: in place of `since`, the only one: 90 for sm_90, whose wgmma no other has.

    Raises:
        ScheduleError: an operator already has another schedule of that name, or another baseline.
    """

    def register(function: Callable) -> Callable:
        name = function.__name__
        new = [own for own in (operator, *others) if not _imported_before(own, function)]
        if baseline:
            for own in new:
                _check_only_baseline(own, function)
        for own in new:
            _registry[own, name] = Schedule(
                name,
                own,
                function,
                dtypes,
                len(_registry),
                usage,
                condition,
                promising,
                supersedes,
                yields,
                kinds,
                baseline,
                since,
                only,
            )
        return function

    return register


def _registered(operator: str, name: str, function: Callable) -> Schedule:
    """The schedule of a name; that its function is an argument has imported its module."""
    return _registry[operator, name]


def _imported_before(operator: str, function: Callable) -> bool:
    """Whether the operator has this schedule from the same file under another name.

    Raises:
        ScheduleError: it has another schedule of that name.
    """
    name, module = function.__name__, function.__module__
    known = _registry.get((operator, name))
    if known is None or known.function.__module__ == module:
        return False
    if _file(known.function) != _file(function):
        raise ScheduleError(f"schedule {name} of {operator} is defined in {known.function.__module__} and {module}")
    return True


def _check_only_baseline(operator: str, function: Callable) -> None:
    """Raise ScheduleError if another schedule of the operator is its baseline."""
    name, module = function.__name__, function.__module__
    for known in _registry.values():
        if known.operator == operator and known.baseline and known.name != name:
            raise ScheduleError(
                f"{operator} has two baselines, {known.name} in {known.function.__module__} and {name} in {module}: "
                "one is enough"
            )


def _file(function: Callable) -> str:
    return os.path.realpath(function.__code__.co_filename)


@functools.cache
def _load() -> dict[str, Error]:
    """Import every module of every package of schedules, the project's own first; importing them registers them.

    Returns:
        Why packages of others do not import, by their names; each is also one line of the log.

    Raises:
        HostError: the project's own package does not import, as where TVM finds too little memory to load.
    """
    try:
        _import_all(BUILT_IN)
    except (ImportError, AttributeError, MemoryError, OSError) as error:
        raise HostError(f"the schedules cannot be imported; is there enough memory? {describe(error)}") from error
    broken: dict[str, Error] = {}
    for name in dict.fromkeys(entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)):
        try:
            with user_code(f"package {name} of schedules", name):
                _import_all(name)
        except Error as error:
            broken[name] = error
            _logger.warning("%s", error if isinstance(error, ScheduleFailure) else f"package {name}: {error}")
            log_traceback(error)
    return broken


def _import_all(name: str) -> None:
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
    _load()
    w = None if workload is None else as_workload(workload)
    return sorted((s for s in _registry.values() if w is None or _may_apply(s, w)), key=_place)


def _may_apply(s: Schedule, w: Workload) -> bool:
    """Whether a schedule applies, or raises an exception when asked, which is reported where it is used."""
    try:
        return s.applies(w)
    except ScheduleFailure:
        return True


def _place(s: Schedule) -> tuple[Any, ...]:
    """What schedules are listed by; when they were imported is of no account."""
    module = s.function.__module__
    if module.startswith(f"{BUILT_IN}."):
        return s.operator, False, s.rank  # each folder's `__init__` imports its files in the order of the ladder
    return s.operator, True, module, s.function.__code__.co_firstlineno


def naive(w: Workload) -> Schedule | None:
    """The baseline among the schedules of a workload, which speed-ups are over; None where none of them is."""
    return next((s for s in schedules(w) if s.baseline), None)


def find(w: Workload, name: str) -> Schedule:
    """Return the schedule of that name for a workload.

    Raises:
        ScheduleError: there is none, or it does not apply to the workload; the message says which condition is not met.
    """
    broken = _load()
    found = _registry.get((w.operator, name))
    if found and _may_apply(found, w):
        return found
    if found:
        raise ScheduleError(_why_not(found, w))
    known = ", ".join(s.name for s in schedules(w)) or "none"
    reason = f"no schedule {name!r} for {w.operator} in {w.dtype}"
    raise ScheduleError("; ".join([reason, f"there are: {known}", *map(str, broken.values())]))


def as_schedule(w: Workload, schedule: str | Schedule) -> Schedule:
    """Return a schedule as it is, or find it by its name; raises `ScheduleError` as `find`, or for anything else."""
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        raise ScheduleError(f"expected a schedule or its name, such as 'tiling', not {quote(schedule)}")
    return find(w, schedule)


def _why_not(s: Schedule, w: Workload) -> str:
    """Say what a workload of a schedule's operator lacks for the schedule to apply."""
    if w.dtype not in s.dtypes:
        return f"{s.name} computes {s.operator} in {', '.join(s.dtypes)}; this workload has {w.dtype}"
    assert s.condition
    return f"{s.name} computes {s.operator} in {w.dtype}{describe_unmet(s.condition, w)}"


def in_reserve(w: Workload, kind: str, arch: str | None = None) -> list[Schedule]:
    """The schedules that a search which names none tries beside those of `to_tune`, as they seldom win.

    Args:
        w: the workload.
        kind: of the device.
        arch: its NVIDIA architecture; None for any.
    """
    first = to_tune(w, kind, arch)
    superseded = {name for s in first for name in s.supersedes}
    there = [s for s in _sound(w, kind, arch) if not s.baseline and s.name not in superseded]
    return [s for s in reversed(there) if s not in first]  # the last ones are mostly the fastest


def to_tune(w: Workload, kind: str, arch: str | None = None) -> list[Schedule]:
    """The schedules whose spaces are searched if none is named, at least one; the first is built if nothing is known.

    Args:
        w: the workload.
        kind: of the device.
        arch: its NVIDIA architecture; None for any.

    Raises:
        ScheduleError: there is none.
    """
    promising = [s for s in _sound(w, kind, arch) if s.promises(w)]
    superseded = {name for s in promising for name in s.supersedes}
    found = [s for s in promising if s.name not in superseded]
    if not found:
        raise ScheduleError(f"no schedule of {w} is made to be tuned on {arch or kind}: name one")
    return sorted(found, key=lambda s: s.yields_to_others(w))


def _sound(w: Workload, kind: str, arch: str | None) -> list[Schedule]:
    """The schedules for a workload and a device, without those whose own code raises when asked what they are for."""
    sound = []
    for s in schedules(w):
        if not s.runs_on(kind, arch):
            continue
        try:
            _ = s.applies(w), s.promises(w) and s.yields_to_others(w)
        except ScheduleFailure as failure:
            report_left_out(failure)
            continue
        sound.append(s)
    return sound


def report_left_out(failure: ScheduleError, what: str = "the search") -> None:
    """Log, once for each failure, that something goes on without a schedule that failed.

    Args:
        failure: what the schedule's code raised, or why TVM cannot schedule the workload that way.
        what: what goes on, for the message.
    """
    message = f"{failure}; {what} goes on without it"
    if message not in _reported:
        _reported.add(message)
        _logger.warning("%s", message)
        log_traceback(failure)


_reported: set[str] = set()  # messages of this process
