"""Which statement of the scheduled TIR a statement of the lowered function is of, and which stage of the declaration.

Lowering keeps no trace of either, but it keeps the names of buffers, the calls, and the order of the text, while it
unrolls loops, copies what a software pipeline or a virtual thread repeats, and drops what nobody needs. Statements are
alike that store to the same buffer, reading what they store to or not, or that make the same call on the same buffers.
Where only one scheduled statement is like a lowered one, it is its origin; where there are several, but just as many
lowered ones, or as many once the loops marked to be unrolled are, they are each other's in the order of the text. Of
the rest nothing is told. Nor is there an origin of what lowering adds: barriers, common subexpressions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

Key: TypeAlias = tuple[Any, ...] | None  # what statements that are alike have in common; None for names of values
ASYNC_COPY = "tirx.s_tir.cp_async_raw"


@dataclass(frozen=True)
class Leaf:
    """A statement: its number in the order of the text, what it is like, and the buffers that it names.

    Attributes:
        number: from 0 on.
        key: of the statement.
        stores: the buffer that is stored to; None for a call.
        reads: the buffers that are named in what is stored, or in the call.
        updates: whether a store reads what it stores to.
    """

    number: int
    key: Key
    stores: str | None
    reads: frozenset[str]
    updates: bool


@dataclass
class _Group:
    """Leaves and groups in order, so many times if unrolled."""

    times: int
    inside: list[Leaf | _Group] = field(default_factory=list)

    def leaves(self, *, unrolled: bool) -> Iterator[Leaf]:
        """The statements in the order in which they are executed."""
        for _ in range(self.times if unrolled else 1):
            for each in self.inside:
                if isinstance(each, Leaf):
                    yield each
                else:
                    yield from each.leaves(unrolled=unrolled)


def leaves(function: PrimFunc) -> list[Leaf]:
    """The statements of TIR, scheduled or lowered, in the order of `tvmconv.compiler.lines.tir_lines`."""
    return [leaf for nest in _nests(function) for leaf in nest.leaves(unrolled=False)]


def scheduled_origins(scheduled: PrimFunc, lowered: Sequence[PrimFunc]) -> list[dict[int, int]]:
    """The origins of lowered statements: their numbers in the scheduled function.

    Args:
        scheduled: the scheduled TIR.
        lowered: the device functions, in the order of their launches.

    Returns:
        By device function, the scheduled statement of those lowered ones of which it is known.
    """
    nests = _nests(scheduled)
    if len(nests) != len(lowered):
        nests = [_Group(1, list(nests))] * len(lowered)
    return [_matched(nest, leaves(function)) for nest, function in zip(nests, lowered, strict=True)]


def _matched(nest: _Group, lowered: Sequence[Leaf]) -> dict[int, int]:
    found: dict[int, int] = {}
    plain, unrolled = (_by_key(nest.leaves(unrolled=unrolled)) for unrolled in (False, True))
    for key, numbers in _by_key(lowered).items():
        origins = plain.get(key, [])
        if len(origins) == 1:
            found |= dict.fromkeys(numbers, origins[0])
            continue
        for candidates in (origins, unrolled.get(key, [])):
            if len(candidates) == len(numbers):
                found |= dict(zip(numbers, candidates, strict=True))
                break
    return found


def _by_key(statements: Iterable[Leaf]) -> dict[Key, list[int]]:
    found: defaultdict[Key, list[int]] = defaultdict(list)
    for each in statements:
        if each.key is not None:
            found[each.key].append(each.number)
    return found


_SUFFIXES = {"reindex", "shared", "local", "dyn", "warp", "pad", "rf", "wmma", "matrix", "accumulator", "a", "b"}


def declared_origins(declaration: PrimFunc, scheduled: PrimFunc) -> dict[int, frozenset[int]]:
    """The statements of the declaration that scheduled statements are for, by number, where it is known.

    A statement is for a stage if it stores to its tensor, or to a copy of it, which TVM names after it. One that stores
    elsewhere, or makes a call, is for the only stage whose tensor it reads, or that reads the same input; a call that
    multiplies matrices is for the sum. A stage that nothing is left of was inlined: what is for those that read it is
    for it too.

    Args:
        declaration: of the workload, as TIR.
        scheduled: the scheduled TIR.
    """
    declared = leaves(declaration)
    stages = {each.stores: {e.stores for e in declared if each.stores in e.reads} for each in declared if each.stores}
    inputs = {name for each in declared for name in each.reads} - stages.keys()
    readers = {name: {str(each.stores) for each in declared if name in each.reads} for name in inputs}
    named = {each: _stage(each, declared, readers) for each in leaves(scheduled)}
    left = set(named.values())
    found = {}
    for leaf, stage in named.items():
        inside: set[str | None] = {stage}
        while leaf.reads and (
            more := {each for each, by in stages.items() if each not in left | inside and by & inside}
        ):
            inside |= more
        if stage:
            found[leaf.number] = frozenset(
                each.number
                for each in declared
                if each.stores in inside and (each.stores != stage or _is_of(each, leaf, declared))
            )
    return found


def _is_of(declared: Leaf, leaf: Leaf, others: Sequence[Leaf]) -> bool:
    """Whether a statement is of this one of its stage's: of the initial one of a sum, or of the update."""
    own = [each for each in others if each.stores == declared.stores]
    updates = leaf.updates or (leaf.stores is None and _MULTIPLIES in str(leaf.key))
    if len(own) == 1 or not (updates or (leaf.stores and not leaf.reads)):  # or a copy of the sum
        return True
    return declared.updates == updates


_MULTIPLIES = "mma"  # in the names of what multiplies matrices


def _stage(leaf: Leaf, declared: Sequence[Leaf], readers: Mapping[str, set[str]]) -> str | None:
    """The stage that a statement is for."""
    if leaf.key is None:
        return None
    stages = {str(each.stores) for each in declared}
    if leaf.stores and (stage := _copied(leaf.stores, stages)):
        return stage
    if leaf.stores is None and _MULTIPLIES in str(leaf.key[1]):
        found = {str(each.stores) for each in declared if each.updates}
    else:
        copies = {copied for name in leaf.reads for copied in [_copied(name, stages)] if copied}
        sources = {source for name in leaf.reads for source in [_copied(name, readers)] if source}
        found = copies.union(*(readers[source] for source in sources))
    return found.pop() if len(found) == 1 else None


def _copied(name: str, names: Container[str]) -> str | None:
    """The stage whose tensor has this name, or a copy of whose tensor has."""
    words = name.split("_")
    for count in range(len(words), 0, -1):
        if "_".join(words[:count]) in names and set(words[count:]) <= _SUFFIXES:
            return "_".join(words[:count])
    return None


def _nests(function: PrimFunc) -> list[_Group]:
    """The root loop nests of a function."""
    body = function.body
    while type(body).__name__ in ("SBlockRealize", "SBlock"):
        body = body.block if type(body).__name__ == "SBlockRealize" else body.body
    parts = list(body.seq) if type(body).__name__ == "SeqStmt" else [body]
    reader, nests = _Reader(), []
    for part in parts:
        nests.append(_Group(1))
        reader.read(part, nests[-1])
    return [nest for nest in nests if nest.inside]


class _Reader:
    """Reads statements, and numbers them."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._aliases: dict[Any, Any] = {}  # buffers that stand for a region of another

    def read(self, node: Any, into: _Group) -> None:
        match type(node).__name__:
            case "SeqStmt":
                for each in node.seq:
                    self.read(each, into)
            case "AttrStmt" | "While":
                self.read(node.body, into)
            case "For":
                unrolled = int(node.kind) == _UNROLLED and type(node.extent).__name__ == "IntImm"
                into.inside.append(inside := _Group(int(node.extent) if unrolled else 1))
                self.read(node.body, inside)
            case "IfThenElse":
                self.read(node.then_case, into)
                if node.else_case is not None:
                    self.read(node.else_case, into)
            case "SBlockRealize":
                self.read(node.block, into)
            case "SBlock":
                self._aliases |= {each.buffer: each.source.source for each in node.match_buffers}
                if node.init is not None:
                    self.read(node.init, into)
                self.read(node.body, into)
            case "BufferStore" | "Evaluate" | "Bind":
                into.inside.append(self._leaf(node))

    def _leaf(self, node: Any) -> Leaf:
        number = self._count.total()
        self._count["statement"] += 1
        kind = type(node).__name__
        if kind == "Bind":
            return Leaf(number, None, None, frozenset(), updates=False)
        reads = frozenset(self._named(node.value))
        if kind == "BufferStore":
            name = self._name(node.buffer)
            return Leaf(number, ("store", name, reads), name, reads, updates=name in reads)
        if type(node.value).__name__ != "Call":
            return Leaf(number, None, None, reads, updates=False)
        called = str(node.value.op.name)
        if called == ASYNC_COPY:
            name = self._name(node.value.args[0].args[0])
            return Leaf(number, ("store", name, reads - {name}), name, reads - {name}, updates=False)
        return Leaf(number, ("call", called, reads), None, reads, updates=False)

    def _named(self, expression: Any) -> Iterator[str]:
        import tvm_ffi
        from tvm import tirx
        from tvm.tirx.buffer import BufferType

        found: list[Any] = []
        tvm_ffi.structural_walk(expression, (tirx.Var, found.append), order="post")
        return (self._name(each) for each in found if isinstance(each.ty, BufferType))

    def _name(self, buffer: Any) -> str:
        while buffer in self._aliases:
            buffer = self._aliases[buffer]
        return str(buffer.name).replace(".", "_")


_UNROLLED = 3  # tvm.tirx.ForKind.UNROLLED
