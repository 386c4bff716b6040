"""What a schedule says of its function as a whole: annotations of the root block, which the compiler reads."""

from typing import Literal

Space = Literal["global", "constant", "texture"]  # where an argument may lie

SPACES = "tvmconv.space"  # a space by argument name
KEPT = "tvmconv.kept"  # names of arguments that stay as they are from launch to launch
AS_ALLOCATED = "tvmconv.as_allocated"  # arrays have the sizes that they are to have
HOIST_GUARDS = "tvmconv.hoist_guards"  # tests that only threads and blocks decide are made outside the loops
OWN_PLACES = "tvmconv.own_places"  # no array takes another's place: TVM does not see what TMA reads and writes
