"""Translation of statements of TIR to Python functions: loops, branches and bindings, some of which may suspend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tvmconv.emulator.instructions import dispatch
from tvmconv.emulator.state import CompiledStatement, Mask, SuspendableStatement, compose_statement, run_statement
from tvmconv.emulator.synchronization.fibers import POLL, FiberGenerator, Fork, run_fibers
from tvmconv.emulator.translation.arithmetic import Value, is_uniform
from tvmconv.emulator.translation.expressions import ExpressionTranslator, StaticCode
from tvmconv.errors import AnalysisError
from tvmconv.target import WARPGROUP_SIZE


class StatementTranslator(ExpressionTranslator):
    """Translator of statements."""

    def translate_statement(self, node: Any) -> CompiledStatement:
        """Return the function that executes a statement for the lanes of a mask."""
        match type(node).__name__:
            case "SeqStmt":
                return self._translate_sequence([self.translate_statement(child) for child in node.seq])
            case "AttrStmt":
                return self._translate_attribute(node)
            case "For":
                return self._translate_for(node)
            case "While":
                return self._translate_while(node)
            case "IfThenElse":
                return self._translate_if(node)
            case "Bind":
                self._statement_index += 1
                return self._translate_bind(node)
            case "BufferStore":
                self._statement_index += 1
                return self._translate_store(node)
            case "Evaluate":
                self._statement_index += 1
                return self._translate_evaluate(node.value)
            case "AllocBuffer":
                return self._allocate_buffer(node.buffer)
            case "DeclBuffer":
                self._declare_buffer(node.buffer, node.data)
                return lambda mask: None
            case kind:
                raise AnalysisError(f"the emulator does not support statements of kind {kind}")

    @staticmethod
    def _translate_sequence(codes: Sequence[CompiledStatement]) -> CompiledStatement:
        def run(mask: Mask) -> FiberGenerator:
            for code in codes:
                if isinstance(code, SuspendableStatement):
                    yield from code.run(mask)
                else:
                    code(mask)

        return compose_statement(run, codes)

    def _translate_attribute(self, node: Any) -> CompiledStatement:
        state, key = self.state, str(node.attr_key)
        if key == "thread_extent":
            values = state.read_axis(str(node.node.thread_tag))
            self._variables[node.node.var] = StaticCode(lambda mask: values)
            return self.translate_statement(node.body)
        body = self.translate_statement(node.body)
        if key == "async_commit_queue_scope":  # TVM commits the copies inside as a group
            return self._translate_sequence([body, lambda mask: state.shared.commit_group(state.find_lanes(mask))])
        if key == "async_wait_inflight_count":
            max_pending_groups = int(node.value)
            return self._translate_sequence(
                [lambda mask: state.shared.wait_group(state.find_lanes(mask), max_pending_groups), body]
            )
        return body

    def _translate_for(self, node: Any) -> CompiledStatement:
        start_code, extent_code = self.translate_expression(node.min), self.translate_expression(node.extent)
        slot, values = self._allocate_slot(node.loop_var), self._variable_values
        body = self.translate_statement(node.body)

        state = self.state

        def iterate_masks(mask: Mask) -> Iterator[Mask]:
            """Set the loop variable, and yield the active lanes, for each iteration."""
            start = state.evaluate_data_independent(start_code, mask)
            count = state.evaluate_data_independent(extent_code, mask)
            if is_uniform(start) and is_uniform(count):
                for iteration in range(int(count)):
                    values[slot] = int(start) + iteration
                    yield mask
                return
            counts = np.broadcast_to(count, state.all_lanes.shape)
            for iteration in range(int(np.max(counts[state.find_lanes(mask)]))):
                active = iteration < counts
                active = active if mask is None else active & mask
                if active.any():
                    values[slot] = start + iteration
                    yield active

        def run(mask: Mask) -> FiberGenerator:
            for active in iterate_masks(mask):
                yield from run_statement(body, active)

        return compose_statement(run, [body])

    def _translate_while(self, node: Any) -> CompiledStatement:
        condition, body = self.translate_expression(node.condition), self.translate_statement(node.body)
        state = self.state

        def run_suspendable(mask: Mask) -> FiberGenerator:
            while True:
                is_true = state.evaluate_data_independent(condition, mask)
                if is_uniform(is_true):
                    if not is_true:
                        return
                else:
                    mask = is_true if mask is None else is_true & mask
                    if mask is None or not mask.any():
                        return
                yield from run_statement(body, mask)
                yield POLL

        return SuspendableStatement(run_suspendable)

    def _translate_if(self, node: Any) -> CompiledStatement:
        condition = self.translate_expression(node.condition)
        then_code = self.translate_statement(node.then_case)
        else_code = self.translate_statement(node.else_case) if node.else_case is not None else None
        state = self.state

        def select_sides(mask: Mask) -> list[tuple[CompiledStatement, Mask]]:
            """Return the sides that are taken, with their active lanes."""
            is_true = state.evaluate_data_independent(condition, mask)
            if is_uniform(is_true):
                taken_code = then_code if is_true else else_code
                return [] if taken_code is None else [(taken_code, mask)]
            taken_sides: list[tuple[CompiledStatement, Mask]] = []
            active = is_true if mask is None else is_true & mask
            if active.any():
                taken_sides.append((then_code, None if mask is None and active.all() else active))
            if else_code is not None:
                active = ~is_true if mask is None else ~is_true & mask
                if active.any():
                    taken_sides.append((else_code, active))
            return taken_sides

        def run(mask: Mask) -> FiberGenerator:
            suspended = []
            for side, active in select_sides(mask):
                if isinstance(side, SuspendableStatement):
                    suspended.append(side.run(active))
                else:
                    side(active)
            if len(suspended) == 1:
                yield from suspended[0]
            elif suspended:
                yield Fork(tuple(suspended))

        return compose_statement(run, [code for code in (then_code, else_code) if code is not None])

    def run_lockstep(self, code: CompiledStatement, lockstep_lanes: int | None, whole_warpgroups: bool) -> None:
        """Execute a statement with all lanes in lock step, or in parts of `lockstep_lanes` lanes that run in turns.

        With `whole_warpgroups`, all threads of whole warpgroups stay in lock step in any case.
        """
        state = self.state
        if not isinstance(code, SuspendableStatement):
            code(state.full_mask)
            return
        threads = state.threads
        masks = [state.full_mask]
        if lockstep_lanes is not None:
            block, thread = np.divmod(state.all_lanes, threads.lanes_per_block)
            num_whole = threads.threads_per_block // WARPGROUP_SIZE * WARPGROUP_SIZE if whole_warpgroups else 0
            sizes = np.where(thread < num_whole, WARPGROUP_SIZE, lockstep_lanes)
            parts = block * threads.lanes_per_block + thread // sizes * sizes
            masks = [(parts == part) & state.thread_mask for part in np.unique(parts)]
        root_values: list[list[Value]] = [list(self._variable_values) for _ in masks]
        current_root = 0

        def switch(root_index: int) -> None:
            """Restore the values of loop and bound variables of a part."""
            nonlocal current_root
            if root_index != current_root:
                root_values[current_root], self._variable_values[:] = self._variable_values[:], root_values[root_index]
                current_root = root_index

        run_fibers([code.run(mask) for mask in masks], switch, state.complete_oldest_copy)

    def _translate_bind(self, node: Any) -> Callable[[Mask], None]:
        code = self.translate_expression(node.value)
        if isinstance(code, StaticCode):
            self._variables[node.var] = code
            return lambda mask: None
        slot, values, state = len(self._variable_values), self._variable_values, self.state
        values += [None, False]  # the value, and whether it depends on memory

        def read_value(mask: Mask) -> Value:
            state.depends_on_memory |= values[slot + 1]
            return values[slot]

        def bind_value(mask: Mask) -> None:
            state.depends_on_memory = False
            value = code(mask)  # copied below because the registers that it was read from may change
            values[slot : slot + 2] = value.copy() if isinstance(value, np.ndarray) else value, state.depends_on_memory

        self._variables[node.var] = read_value
        return bind_value

    def _allocate_slot(self, variable: Any) -> int:
        slot, values = len(self._variable_values), self._variable_values
        values.append(None)
        self._variables[variable] = lambda mask: values[slot]
        return slot

    def _translate_evaluate(self, value: Any) -> CompiledStatement:
        if type(value).__name__ == "Call":
            translated = dispatch.translate_statement(value, self)
            if isinstance(translated, SuspendableStatement):
                return translated
            if translated is not None:
                site, state, run_intrinsic = self._next_site(), self.state, translated

                def run_at_site(mask: Mask) -> None:
                    state.site = site
                    run_intrinsic(mask)

                return run_at_site
        code = self.translate_expression(value)
        return lambda mask: code(mask)
