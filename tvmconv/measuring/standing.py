"""Processes that outlive a search: those that one has done with stand ready for the next."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from tvmconv.errors import Error, HostError
from tvmconv.measuring.child import Child, Forget
from tvmconv.measuring.zygote import Zygote

FORKED = ("tvmconv.measuring.builder",)  # modules whose processes are forked, from one that has loaded what they need
POLL_SECONDS = 0.05  # between two looks at what is beginning


class _Standing:
    """The processes that nobody has at the moment; one for all threads of this process.

    The kernel ends a child with the thread that started it, which for a search is a thread of its own. Those that may
    stand longer are started by a thread that stays as long as this process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._children: dict[str, list[Child | Future[Child]]] = {}
        self._zygote: Zygote | None = None
        self._starter = ThreadPoolExecutor(1, "starter")

    def enter(self) -> None:
        """One block of `standing` more."""
        with self._lock:
            self._blocks += 1

    def leave(self) -> None:
        """One block less; after the last nothing stands."""
        with self._lock:
            self._blocks -= 1
            if self._blocks:
                return
            left, self._children = self._children, {}
        children = [child for several in left.values() for child in several]
        wanted = [child for child in children if not (isinstance(child, Future) and child.cancel())]
        beginning = [child for child in wanted if isinstance(child, Future) and not child.done()]
        for child in wanted:
            if child not in beginning:
                _kill(child)
        for child in beginning:
            while not child.done():
                if self._zygote:
                    self._zygote.stop_loading()  # which takes seconds, and what is beginning waits for it
                wait([child], POLL_SECONDS)
            _kill(child)
        self._starter.submit(int).result()  # until all that was to begin has begun
        with self._lock:
            if self._blocks:
                return
            zygote, self._zygote = self._zygote, None
        if zygote:
            zygote.close()

    def start(self, module: str, environment: Mapping[str, str] | None, scratch: str | None) -> Child:
        """A new process, which may stand later if that is wanted now."""
        if not self._blocks:
            return Child(module, environment, scratch)
        return self._starter.submit(self._start, module, environment, scratch).result()

    def _start(self, module: str, environment: Mapping[str, str] | None, scratch: str | None) -> Child:
        """In the starter's thread: a new process, forked where that is possible."""
        if module not in FORKED or environment or scratch:
            return Child(module, environment, scratch)
        with contextlib.suppress(Error):  # it has ended: then without it
            return Child(module, origin=self._origin())
        return Child(module)

    def _origin(self) -> Zygote:
        """In the starter's thread: what is forked from, begun if it is not there."""
        self._zygote = self._zygote or Zygote()
        return self._zygote

    def begin_origin(self) -> None:
        """Begin the process that others will be forked from."""
        self._starter.submit(self._origin)

    def begin(self, like: str, module: str, first: object) -> None:
        """Let a process that nobody had yet stand, as soon as it is there."""

        def started() -> Child:
            child = self._start(module, None, None)
            if first is not None:
                child.send(first)
            return child

        with self._lock:
            self._children.setdefault(like, []).append(self._starter.submit(started))

    def wait_for(self, like: str, timeout: float) -> bool:
        """Wait until one process of this kind is there; False if none is after so many seconds."""
        with self._lock:
            children = list(self._children.get(like, ()))
        beginning = [child for child in children if isinstance(child, Future)]
        if len(beginning) < len(children):
            return True
        return bool(wait(beginning, timeout, FIRST_COMPLETED).done)

    def standing(self, like: str) -> int:
        """How many processes of this kind stand."""
        with self._lock:
            return len(self._children.get(like, ()))

    def take(self, like: str) -> Child | None:
        """The process of this kind that was handed on last, if there is any."""
        with self._lock:
            children = self._children.get(like)
            child = children.pop() if children else None
        with contextlib.suppress(HostError):  # it did not start: whoever needs one starts another
            return _there(child) if child else None
        return None

    def hand_on(self, like: str, child: Child) -> bool:
        """Let a process stand; False if nobody wants it to."""
        with self._lock:
            if self._blocks:
                child.send(Forget())
                self._children.setdefault(like, []).append(child)
            return self._blocks > 0


def _there(child: Child | Future[Child]) -> Child:
    """A process, once it is there."""
    return child.result() if isinstance(child, Future) else child


def _kill(child: Child | Future[Child]) -> None:
    """End a process; one that did not start needs no end."""
    with contextlib.suppress(HostError):
        _there(child).kill()


_now = _Standing()


def _forget() -> None:
    """In a process that was forked: the children are those of its parent, and the thread is not there."""
    global _now
    _now = _Standing()


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def standing() -> Iterator[None]:
    """Within the block, processes that a `Measurer` is done with stand ready for the next one; at its end they end.

    To load TVM takes seconds, and to bring up a device another: worth it around searches that follow one another.
    Blocks may lie within each other and in several threads; what stands ends with the last of them, or with this
    process, even when that is killed. Without a block no process outlives its `Measurer`.
    """
    mine = _now
    mine.enter()
    try:
        yield
    finally:
        if mine is _now:  # else this process was forked within the block
            mine.leave()


def begin(module: str, like: str, count: int, first: object = None) -> None:
    """Have so many processes stand ready, or nearly so; within a block of `standing` only.

    Args:
        module: whose `main` runs in them.
        like: which processes can do the same, as for `hand_on`.
        count: how many there shall be, those that stand already included.
        first: a message to each; None for none.
    """
    for _ in range(count - _now.standing(like)):
        _now.begin(like, module, first)


def wait_for(like: str, timeout: float) -> bool:
    """Wait until one of the processes that stand, or were begun, is there; False if none is after so many seconds.

    Args:
        like: which processes can do the same, as for `hand_on`.
        timeout: in seconds.
    """
    return _now.wait_for(like, timeout)


def begin_origin() -> None:
    """Begin the process that others are forked from, before any of them is wanted; within a block of `standing`."""
    _now.begin_origin()


def start(module: str, environment: Mapping[str, str] | None, scratch: str | None) -> Child:
    """A new process; its arguments are those of `Child`."""
    return _now.start(module, environment, scratch)


def take(like: str) -> Child | None:
    """A process that stands ready, or is about to: it may still be at what it did for another. None if there is none.

    Args:
        like: what `hand_on` was told.
    """
    return _now.take(like)


def hand_on(like: str, child: Child) -> bool:
    """Let a process stand ready for whoever comes next; False if it is to be ended instead.

    Args:
        like: which processes can do the same.
        child: is ready, or will be once it has done what it is doing; its queue is forgotten.
    """
    return _now.hand_on(like, child)
