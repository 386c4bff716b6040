"""Statements of TIR as Python functions: loops, branches, names, and parts of a block that wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tvmconv.analysis.emulation.compiled import Statement, Waiting
from tvmconv.analysis.emulation.instructions import dispatch
from tvmconv.analysis.emulation.machine import Mask
from tvmconv.analysis.emulation.synchronization.strands import Fork, Steps, Turn, run
from tvmconv.analysis.emulation.translation.arithmetic import Value, uniform
from tvmconv.analysis.emulation.translation.expressions import Expressions
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARPGROUP


class Statements(Expressions):
    """Makes Python functions of statements, once, that are called as often as they run."""

    def statement(self, node: Any) -> Statement:
        """What executes a statement for the lanes of a mask."""
        match type(node).__name__:
            case "SeqStmt":
                return self._sequence([self.statement(each) for each in node.seq])
            case "AttrStmt":
                return self._attribute(node)
            case "For":
                return self._for(node)
            case "While":
                return self._while(node)
            case "IfThenElse":
                return self._if(node)
            case "Bind":
                self._statement += 1
                return self._bind(node)
            case "BufferStore":
                self._statement += 1
                return self._store(node)
            case "Evaluate":
                self._statement += 1
                return self._evaluate(node.value)
            case "AllocBuffer":
                return self._allocate(node.buffer)
            case "DeclBuffer":
                self._declare(node.buffer, node.data)
                return lambda mask: None
            case kind:
                raise AnalysisError(f"a kernel with a statement of the kind {kind}")

    @staticmethod
    def _sequence(codes: Sequence[Statement]) -> Statement:
        plain = [code for code in codes if not isinstance(code, Waiting)]
        if len(plain) == len(codes):

            def sequence(mask: Mask) -> None:
                for code in plain:
                    code(mask)

            return sequence

        def steps(mask: Mask) -> Steps:
            for code in codes:
                if isinstance(code, Waiting):
                    yield from code.run(mask)
                else:
                    code(mask)

        return Waiting(steps)

    def _attribute(self, node: Any) -> Statement:
        machine, key = self.machine, str(node.attr_key)
        if key == "thread_extent":
            values = machine.axis(str(node.node.thread_tag))
            self._names[node.node.var] = (lambda mask: values), True
            return self.statement(node.body)
        body = self.statement(node.body)
        if key == "async_commit_queue_scope":  # TVM makes a group of what is inside
            return self._sequence([body, lambda mask: machine.shared.commit(machine.lanes(mask))])
        if key == "async_wait_inflight_count":
            pending = int(node.value)
            return self._sequence([lambda mask: machine.shared.wait(machine.lanes(mask), pending), body])
        return body

    def _for(self, node: Any) -> Statement:
        first, extent = self.code(node.min), self.code(node.extent)
        slot, values = self._slot(node.loop_var), self._values
        body = self.statement(node.body)

        machine = self.machine

        def masks(mask: Mask) -> Iterator[Mask]:
            """The lanes of each iteration, whose number has been set."""
            begin, count = machine.decided(first, mask), machine.decided(extent, mask)
            if uniform(begin) and uniform(count):
                for i in range(int(count)):
                    values[slot] = int(begin) + i
                    yield mask
                return
            for i in range(int(np.max(np.broadcast_to(count, machine.all_lanes.shape)[machine.lanes(mask)]))):
                inside = i < np.broadcast_to(count, machine.all_lanes.shape)
                inside = inside if mask is None else inside & mask
                if inside.any():
                    values[slot] = begin + i
                    yield inside

        if isinstance(body, Waiting):
            waiting = body.run

            def steps(mask: Mask) -> Steps:
                for inside in masks(mask):
                    yield from waiting(inside)

            return Waiting(steps)
        plain = body

        def loop(mask: Mask) -> None:
            for inside in masks(mask):
                plain(inside)

        return loop

    def _while(self, node: Any) -> Statement:
        condition, body = self.code(node.condition), self.statement(node.body)
        machine = self.machine

        def steps(mask: Mask) -> Steps:
            while True:
                holds = machine.decided(condition, mask)
                if uniform(holds):
                    if not holds:
                        return
                else:
                    mask = holds if mask is None else holds & mask
                    if mask is None or not mask.any():
                        return
                if isinstance(body, Waiting):
                    yield from body.run(mask)
                else:
                    body(mask)
                yield Turn()

        return Waiting(steps)

    def _if(self, node: Any) -> Statement:
        condition = self.code(node.condition)
        then = self.statement(node.then_case)
        otherwise = self.statement(node.else_case) if node.else_case is not None else None
        machine = self.machine

        def sides(mask: Mask) -> list[tuple[Statement, Mask]]:
            """The sides that are taken, and by which lanes."""
            holds = machine.decided(condition, mask)
            if uniform(holds):
                taken = then if holds else otherwise
                return [] if taken is None else [(taken, mask)]
            found: list[tuple[Statement, Mask]] = []
            inside = holds if mask is None else holds & mask
            if inside.any():
                found.append((then, None if mask is None and inside.all() else inside))
            if otherwise is not None:
                inside = ~holds if mask is None else ~holds & mask
                if inside.any():
                    found.append((otherwise, inside))
            return found

        if isinstance(then, Waiting) or isinstance(otherwise, Waiting):

            def steps(mask: Mask) -> Steps:
                waiting = []
                for side, inside in sides(mask):
                    if isinstance(side, Waiting):
                        waiting.append(side.run(inside))
                    else:
                        side(inside)
                if len(waiting) == 1:
                    yield from waiting[0]
                elif waiting:
                    yield Fork(tuple(waiting))

            return Waiting(steps)

        def branch(mask: Mask) -> None:
            for side, inside in sides(mask):
                side(inside)  # type: ignore[operator]  # as neither waits

        return branch

    def run(self, code: Statement, size: int | None, together: bool) -> None:
        """Execute a statement: all lanes in lock step, or so many of a block.

        Args:
            code: the statement.
            size: of what is in lock step; None for all.
            together: whether whole warpgroups are in any case.
        """
        machine = self.machine
        if not isinstance(code, Waiting):
            code(machine.everybody)
            return
        waiting, threads = code.run, machine.threads
        masks = [machine.everybody]
        if size is not None:
            block, thread = np.divmod(machine.all_lanes, threads.padded)
            whole = threads.real // WARPGROUP * WARPGROUP if together else 0
            sizes = np.where(thread < whole, WARPGROUP, size)
            part = block * threads.padded + thread // sizes * sizes
            masks = [(part == each) & machine.real for each in np.unique(part)]
        families: list[list[Value]] = [list(self._values) for _ in masks]
        current = 0

        def switch(family: int) -> None:
            """Loops and names have the values that they have in this part."""
            nonlocal current
            if family != current:
                families[current], self._values[:] = self._values[:], families[family]
                current = family

        run([waiting(mask) for mask in masks], switch, machine.land)

    def _bind(self, node: Any) -> Callable[[Mask], None]:
        code, static = self._expression(node.value)
        if static:
            self._names[node.var] = self._once(code), True
            return lambda mask: None
        slot, values, machine = len(self._values), self._values, self.machine
        values += [None, False]  # and whether it depends on memory

        def read(mask: Mask) -> Value:
            machine.loaded |= values[slot + 1]
            return values[slot]

        def bind(mask: Mask) -> None:
            machine.loaded = False
            value = code(mask)  # a copy: registers that it was read from may change
            values[slot : slot + 2] = value.copy() if isinstance(value, np.ndarray) else value, machine.loaded

        self._names[node.var] = read, False
        return bind

    def _slot(self, variable: Any) -> int:
        slot, values = len(self._values), self._values
        values.append(None)
        self._names[variable] = (lambda mask: values[slot]), False
        return slot

    def _evaluate(self, value: Any) -> Statement:
        if type(value).__name__ == "Call":
            found = dispatch.statement(value, self)
            if isinstance(found, Waiting):
                return found
            if found is not None:
                site, machine, plain = self._site(), self.machine, found

                def sited(mask: Mask) -> None:
                    machine.site = site
                    plain(mask)

                return sited
        code, _ = self._expression(value)
        return lambda mask: code(mask)
