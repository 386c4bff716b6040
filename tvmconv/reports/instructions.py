"""The composition of a kernel's machine code, as text."""

from __future__ import annotations

from tvmconv.analysis.sass.instruction_mix import InstructionMix, analyze_mix
from tvmconv.compiler.sass_listing import Listing


def format_instructions(listing: Listing) -> str:
    """Return the instruction mix of one device function, its innermost loop, and its synchronization."""
    instruction_mix = analyze_mix(listing)
    lines = [
        f"instructions  {instruction_mix.num_instructions:,}: {_format_class_counts(instruction_mix.class_counts)}"
    ]
    if instruction_mix.inner_loop:
        loop = instruction_mix.inner_loop
        nested_note = ", without the loops inside it" if loop.has_loops else ""
        lines += [
            f"inner loop    {loop.num_issue_slots:,} issue slots per iteration{nested_note}, "
            f"{loop.num_work_slots:,} of them multiply-adds "
            f"({loop.work_fraction:.0%}); addresses {loop.first_address:04x} to {loop.last_address:04x}",
            f"              {_format_class_counts(loop.class_counts)}",
        ]
    else:
        lines.append("inner loop    none: all arithmetic is unrolled")
    return "\n".join([*lines, f"waits         {_format_waits(instruction_mix)}"])


def _format_class_counts(classes: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in classes.items())


def _format_waits(instruction_mix: InstructionMix) -> str:
    texts = [f"{instruction_mix.num_barriers} barriers in the code"]
    if instruction_mix.max_pending_groups is not None:
        texts.append(f"up to {instruction_mix.max_pending_groups} groups of asynchronous copies pending after a wait")
    if instruction_mix.num_mbarriers:
        texts.append(f"{instruction_mix.num_mbarriers} mbarriers")
    return ", ".join(texts)
