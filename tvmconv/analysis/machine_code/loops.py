"""The loops of machine code: natural loops of its control flow.

A branch back to what every way to it comes by is a loop's (Aho, Lam, Sethi and Ullman, "Compilers", 9.6): so code that
the compiler put behind the kernel's end, from where it branches back into the middle, makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvmconv.compiler.listing import Instruction, Listing

_BRANCHES = ("BRA", "CALL")  # functions are put in place: a call is of what follows, and does not come back


@dataclass(frozen=True)
class Loop:
    """A loop.

    Attributes:
        head: the index of the instruction that it begins with.
        inside: the indices of its instructions, those of the loops in it among them.
        own: those that are in no loop in it.
    """

    head: int
    inside: frozenset[int]
    own: frozenset[int]


def loops(listing: Listing) -> list[Loop]:
    """The loops of a kernel, by where they begin; those that branch to themselves alone end it, and are none."""
    after = successors(listing)
    before: list[list[int]] = [[] for _ in listing]
    for place, nexts in enumerate(after):
        for each in nexts:
            before[each].append(place)
    found: dict[int, set[int]] = {}
    dominators = _dominators(after, before)
    for place, nexts in enumerate(after):
        for head in nexts:
            if head < place and _dominates(dominators, head, place):
                found.setdefault(head, {head}).update(_reaching(place, head, before))
    return [
        Loop(head, frozenset(inside), frozenset(inside.difference(*(b for h, b in found.items() if b < inside))))
        for head, inside in sorted(found.items())
    ]


def successors(listing: Listing) -> list[list[int]]:
    """What may be executed next, of each instruction, by index."""
    places = {each.address: place for place, each in enumerate(listing)}
    joins: dict[str, int] = {}  # where threads that have parted meet, by barrier register
    found: list[list[int]] = []
    for place, each in enumerate(listing):
        nexts: list[int] = []
        register = each.operands.split(",")[0].strip()
        if each.opcode == "BSSY" and each.target is not None:
            joins[register] = places[each.target]
        elif each.opcode in _BRANCHES and each.target is not None:
            nexts.append(places[each.target])
        elif each.opcode == "BSYNC" and register in joins:
            nexts.append(joins[register])
        goes_on = each.opcode not in ("EXIT", "RET", *_BRANCHES) or _is_conditional(each)
        if goes_on and place + 1 < len(listing):
            nexts.append(place + 1)
        found.append(nexts)
    return found


def _is_conditional(each: Instruction) -> bool:
    """Whether a branch may not be taken: on a predicate before it, or among its operands."""
    return bool(each.predicate) or (each.opcode == "BRA" and "," in each.operands)


def _dominators(after: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> list[int]:
    """The nearest instruction by which every way to an instruction comes; -1 where there is no way.

    Source: Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm" (2001).
    """
    order: list[int] = []
    seen, stack = {0}, [(0, iter(after[0]))] if after else []
    while stack:
        place, nexts = stack[-1]
        if (fresh := next((each for each in nexts if each not in seen), None)) is not None:
            seen.add(fresh)
            stack.append((fresh, iter(after[fresh])))
        else:
            order.append(place)
            stack.pop()
    rank = {place: number for number, place in enumerate(order)}
    nearest = [-1] * len(after)
    if after:
        nearest[0] = 0
    changed = True
    while changed:
        changed = False
        for place in reversed(order[:-1]):
            known = [each for each in before[place] if nearest[each] >= 0]
            meeting = known[0]
            for other in known[1:]:
                while meeting != other:
                    while rank[meeting] < rank[other]:
                        meeting = nearest[meeting]
                    while rank[other] < rank[meeting]:
                        other = nearest[other]
            if nearest[place] != meeting:
                nearest[place], changed = meeting, True
    return nearest


def _dominates(nearest: Sequence[int], head: int, place: int) -> bool:
    while place not in (head, 0, -1):
        place = nearest[place]
    return place == head


def _reaching(place: int, head: int, before: Sequence[Sequence[int]]) -> set[int]:
    """What leads to an instruction, without coming by a loop's head."""
    found, waiting = {place, head}, [place]
    while waiting:
        for each in before[waiting.pop()]:
            if each not in found:
                found.add(each)
                waiting.append(each)
    return found
