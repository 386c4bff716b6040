"""What a kernel's machine code is made of, as text."""

from __future__ import annotations

from tvmconv.analysis.machine_code.mix import Mix, mix
from tvmconv.compiler.listing import Listing


def instructions(listing: Listing) -> str:
    """The instruction mix of one step, its innermost loop, and how its threads wait for each other and for copies."""
    found = mix(listing)
    lines = [f"instructions  {found.instructions:,}: {_shares(found.classes)}"]
    if found.inner:
        loop = found.inner
        inside = ", besides the loops in it" if loop.has_loops else ""
        lines += [
            f"inner loop    {loop.slots:,} issue slots an iteration{inside}, {loop.working:,} of them multiply and add "
            f"({loop.share:.0%}); addresses {loop.first:04x} to {loop.last:04x}",
            f"              {_shares(loop.classes)}",
        ]
    else:
        lines.append("inner loop    none: all arithmetic is unrolled")
    return "\n".join([*lines, f"waits         {_waits(found)}"])


def _shares(classes: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in classes.items())


def _waits(found: Mix) -> str:
    told = [f"{found.barriers} barriers in the text"]
    if found.copy_groups is not None:
        told.append(f"up to {found.copy_groups} groups of asynchronous copies under way behind a wait for others")
    if found.mbarriers:
        told.append(f"{found.mbarriers} mbarriers")
    return ", ".join(told)
