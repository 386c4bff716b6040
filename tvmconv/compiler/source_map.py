"""Mapping of lowered statements to statements of the scheduled TIR and of the workload's declaration.

Lowering records no origins. It keeps the names of buffers, the calls and the order of statements, while it unrolls
loops, duplicates statements for software pipelines and virtual threads, and removes unused ones. Statements have the
same key if they store to the same buffer (with or without reading it) or make the same call on the same buffers. If
only one scheduled statement has the key of a lowered one, it is the origin. If several have it, they are matched in
order when their number equals that of the lowered ones, before or after unrolling. Other statements have no known
origin, and neither do those that lowering adds, such as barriers and common subexpressions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from tvmconv.compiler.tir_nodes import collect_nodes

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

StatementKey: TypeAlias = tuple[Any, ...] | None  # equal for similar statements; None for bindings of values
ASYNC_COPY_OP = "tirx.s_tir.cp_async_raw"


@dataclass(frozen=True)
class Statement:
    """A statement, by its index in the text, with the properties by which it is matched.

    A call stores to no buffer; a store is an update if it reads its own buffer.
    """

    index: int
    key: StatementKey
    stored_buffer: str | None
    read_buffers: frozenset[str]
    is_update: bool


@dataclass
class _LoopGroup:
    """Statements and nested groups of a loop, which unrolling repeats `unroll_factor` times."""

    unroll_factor: int
    members: list[Statement | _LoopGroup] = field(default_factory=list)

    def iterate_statements(self, *, unrolled: bool) -> Iterator[Statement]:
        """Yield the statements in execution order."""
        for _ in range(self.unroll_factor if unrolled else 1):
            for member in self.members:
                if isinstance(member, Statement):
                    yield member
                else:
                    yield from member.iterate_statements(unrolled=unrolled)


def list_statements(function: PrimFunc) -> list[Statement]:
    """Return the statements of scheduled or lowered TIR, in the order of `source_lines.map_tir_lines`."""
    return [statement for nest in _split_loop_nests(function) for statement in nest.iterate_statements(unrolled=False)]


def map_to_scheduled(scheduled: PrimFunc, lowered: Sequence[PrimFunc]) -> list[dict[int, int]]:
    """Return the index of the scheduled statement by that of the lowered one, where known, by device function."""
    nests = _split_loop_nests(scheduled)
    if len(nests) != len(lowered):
        nests = [_LoopGroup(1, list(nests))] * len(lowered)
    return [_match_statements(nest, list_statements(function)) for nest, function in zip(nests, lowered, strict=True)]


def _match_statements(nest: _LoopGroup, lowered: Sequence[Statement]) -> dict[int, int]:
    matches: dict[int, int] = {}
    rolled_numbers, unrolled = (_group_by_key(nest.iterate_statements(unrolled=unrolled)) for unrolled in (False, True))
    for key, numbers in _group_by_key(lowered).items():
        origins = rolled_numbers.get(key, [])
        if len(origins) == 1:
            matches |= dict.fromkeys(numbers, origins[0])
            continue
        for candidates in (origins, unrolled.get(key, [])):
            if len(candidates) == len(numbers):
                matches |= dict(zip(numbers, candidates, strict=True))
                break
    return matches


def _group_by_key(statements: Iterable[Statement]) -> dict[StatementKey, list[int]]:
    numbers_by_key: defaultdict[StatementKey, list[int]] = defaultdict(list)
    for statement in statements:
        if statement.key is not None:
            numbers_by_key[statement.key].append(statement.index)
    return numbers_by_key


_COPY_SUFFIXES = {"reindex", "shared", "local", "dyn", "warp", "pad", "rf", "wmma", "matrix", "accumulator", "a", "b"}


def map_to_declared(declaration: PrimFunc, scheduled: PrimFunc) -> dict[int, frozenset[int]]:
    """Map scheduled statements to statements of the declaration by index, where known.

    A statement belongs to a stage if it stores to the stage's tensor or to a copy, which TVM names after the tensor. A
    statement that stores elsewhere or makes a call belongs to the only stage whose tensor it reads, or that reads the
    same input. A matrix multiplication belongs to the reduction. A stage without statements was inlined and belongs to
    the statements of its readers.
    """
    declared = list_statements(declaration)
    stages = {
        item.stored_buffer: {e.stored_buffer for e in declared if item.stored_buffer in e.read_buffers}
        for item in declared
        if item.stored_buffer
    }
    inputs = {name for item in declared for name in item.read_buffers} - stages.keys()
    readers = {name: {str(item.stored_buffer) for item in declared if name in item.read_buffers} for name in inputs}
    stage_by_statement = {item: _find_stage(item, declared, readers) for item in list_statements(scheduled)}
    live_stages = set(stage_by_statement.values())
    origins = {}
    for statement, stage in stage_by_statement.items():
        merged_stages: set[str | None] = {stage}
        while statement.read_buffers and (
            inlined_stages := {
                item
                for item, stage_readers in stages.items()
                if item not in live_stages | merged_stages and stage_readers & merged_stages
            }
        ):
            merged_stages |= inlined_stages
        if stage:
            origins[statement.index] = frozenset(
                item.index
                for item in declared
                if item.stored_buffer in merged_stages
                and (item.stored_buffer != stage or _has_same_reduction_role(item, statement, declared))
            )
    return origins


def _has_same_reduction_role(
    declared: Statement, statement: Statement, declared_statements: Sequence[Statement]
) -> bool:
    """Return whether both statements initialize a reduction, or both update it, if their stage has both."""
    stage_statements = [other for other in declared_statements if other.stored_buffer == declared.stored_buffer]
    is_update = statement.is_update or (statement.stored_buffer is None and _MATRIX_MULTIPLY_NAME in str(statement.key))
    is_init = bool(statement.stored_buffer) and not statement.read_buffers
    if len(stage_statements) == 1 or not (is_update or is_init):  # the latter copies the result of the reduction
        return True
    return declared.is_update == is_update


_MATRIX_MULTIPLY_NAME = "mma"  # part of the names of matrix multiplications


def _find_stage(statement: Statement, declared: Sequence[Statement], readers: Mapping[str, set[str]]) -> str | None:
    """Return the stage that a statement belongs to; None if unknown."""
    if statement.key is None:
        return None
    stages = {str(item.stored_buffer) for item in declared}
    if statement.stored_buffer and (stage := _find_copied_stage(statement.stored_buffer, stages)):
        return stage
    if statement.stored_buffer is None and _MATRIX_MULTIPLY_NAME in str(statement.key[1]):
        candidates = {str(item.stored_buffer) for item in declared if item.is_update}
    else:
        copies = {stage for name in statement.read_buffers if (stage := _find_copied_stage(name, stages))}
        sources = {source for name in statement.read_buffers if (source := _find_copied_stage(name, readers))}
        candidates = copies.union(*(readers[source] for source in sources))
    return candidates.pop() if len(candidates) == 1 else None


def _find_copied_stage(name: str, names: Container[str]) -> str | None:
    """Return the name in `names` of which a buffer name is equal or a copy; None if there is none."""
    words = name.split("_")
    for count in range(len(words), 0, -1):
        if "_".join(words[:count]) in names and set(words[count:]) <= _COPY_SUFFIXES:
            return "_".join(words[:count])
    return None


def _split_loop_nests(function: PrimFunc) -> list[_LoopGroup]:
    body = function.body
    while type(body).__name__ in ("SBlockRealize", "SBlock"):
        body = body.block if type(body).__name__ == "SBlockRealize" else body.body
    nodes = list(body.seq) if type(body).__name__ == "SeqStmt" else [body]
    numberer, nests = _StatementNumberer(), []
    for node in nodes:
        nests.append(_LoopGroup(1))
        numberer.visit(node, nests[-1])
    return [nest for nest in nests if nest.members]


class _StatementNumberer:
    def __init__(self) -> None:
        self._num_statements = 0
        self._buffer_aliases: dict[Any, Any] = {}  # source buffers of matched regions

    def visit(self, node: Any, group: _LoopGroup) -> None:
        match type(node).__name__:
            case "SeqStmt":
                for child in node.seq:
                    self.visit(child, group)
            case "AttrStmt" | "While":
                self.visit(node.body, group)
            case "For":
                unrolled = int(node.kind) == _UNROLLED_KIND and type(node.extent).__name__ == "IntImm"
                group.members.append(subgroup := _LoopGroup(int(node.extent) if unrolled else 1))
                self.visit(node.body, subgroup)
            case "IfThenElse":
                self.visit(node.then_case, group)
                if node.else_case is not None:
                    self.visit(node.else_case, group)
            case "SBlockRealize":
                self.visit(node.block, group)
            case "SBlock":
                self._buffer_aliases |= {child.buffer: child.source.source for child in node.match_buffers}
                if node.init is not None:
                    self.visit(node.init, group)
                self.visit(node.body, group)
            case "BufferStore" | "Evaluate" | "Bind":
                group.members.append(self._make_statement(node))

    def _make_statement(self, node: Any) -> Statement:
        index, self._num_statements = self._num_statements, self._num_statements + 1
        kind = type(node).__name__
        if kind == "Bind":
            return Statement(index, None, None, frozenset(), is_update=False)
        read_buffers = frozenset(self._list_named_buffers(node.value))
        if kind == "BufferStore":
            name = self._get_buffer_name(node.buffer)
            return Statement(index, ("store", name, read_buffers), name, read_buffers, is_update=name in read_buffers)
        if type(node.value).__name__ != "Call":
            return Statement(index, None, None, read_buffers, is_update=False)
        op_name = str(node.value.op.name)
        if op_name == ASYNC_COPY_OP:
            name = self._get_buffer_name(node.value.args[0].args[0])
            read_buffers -= {name}
            return Statement(index, ("store", name, read_buffers), name, read_buffers, is_update=False)
        return Statement(index, ("call", op_name, read_buffers), None, read_buffers, is_update=False)

    def _list_named_buffers(self, expression: Any) -> Iterator[str]:
        from tvm import tirx
        from tvm.tirx.buffer import BufferType

        variables = collect_nodes(expression, tirx.Var)
        return (self._get_buffer_name(variable) for variable in variables if isinstance(variable.ty, BufferType))

    def _get_buffer_name(self, buffer: Any) -> str:
        while buffer in self._buffer_aliases:
            buffer = self._buffer_aliases[buffer]
        return str(buffer.name).replace(".", "_")


_UNROLLED_KIND = 3  # tvm.tirx.ForKind.UNROLLED
