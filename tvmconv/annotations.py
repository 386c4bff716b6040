"""What a schedule says of its function as a whole: annotations of the root block, which the compiler reads."""

from typing import Literal

MemoryScope = Literal["global", "constant", "texture"]  # where an argument may lie

MEMORY_SCOPES = "tvmconv.space"  # a space by argument name
CONSTANT_ARGS = "tvmconv.kept"  # names of arguments that stay as they are from launch to launch
KEEP_ALLOCATED_SIZES = "tvmconv.as_allocated"  # arrays have the sizes that they are to have
HOIST_GUARDS = "tvmconv.hoist_guards"  # tests that only threads and blocks decide are made outside the loops
DISABLE_BUFFER_REUSE = (
    "tvmconv.own_places"  # no array takes another's place: TVM does not see what TMA reads and writes
)
