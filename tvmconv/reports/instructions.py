"""What a kernel's machine code is made of, as text."""

from __future__ import annotations

from tvmconv.analysis.sass.instruction_mix import InstructionMix, analyze_mix
from tvmconv.compiler.sass_listing import Listing


def format_instructions(listing: Listing) -> str:
    """The instruction mix of one step, its innermost loop, and how its threads wait for each other and for copies."""
    instruction_mix = analyze_mix(listing)
    lines = [
        f"instructions  {instruction_mix.num_instructions:,}: {_format_class_counts(instruction_mix.class_counts)}"
    ]
    if instruction_mix.inner_loop:
        loop = instruction_mix.inner_loop
        nested_note = ", besides the loops in it" if loop.has_loops else ""
        lines += [
            f"inner loop    {loop.num_issue_slots:,} issue slots an iteration{nested_note}, "
            f"{loop.num_work_slots:,} of them multiply and add "
            f"({loop.work_fraction:.0%}); addresses {loop.first_address:04x} to {loop.last_address:04x}",
            f"              {_format_class_counts(loop.class_counts)}",
        ]
    else:
        lines.append("inner loop    none: all arithmetic is unrolled")
    return "\n".join([*lines, f"waits         {_format_waits(instruction_mix)}"])


def _format_class_counts(classes: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in classes.items())


def _format_waits(instruction_mix: InstructionMix) -> str:
    texts = [f"{instruction_mix.num_barriers} barriers in the text"]
    if instruction_mix.max_pending_groups is not None:
        texts.append(
            f"up to {instruction_mix.max_pending_groups} groups of asynchronous copies under way "
            "behind a wait for others"
        )
    if instruction_mix.num_mbarriers:
        texts.append(f"{instruction_mix.num_mbarriers} mbarriers")
    return ", ".join(texts)
