"""Annotations of the root block through which a schedule controls how the compiler lowers its function."""

from typing import Literal

MemoryScope = Literal["global", "constant", "texture"]  # memory from which a kernel reads an argument

MEMORY_SCOPES = "tvmconv.space"  # memory scope by argument name
CONSTANT_ARGS = "tvmconv.kept"  # names of arguments that do not change between launches
KEEP_ALLOCATED_SIZES = "tvmconv.as_allocated"  # allocated buffers keep their sizes
HOIST_GUARDS = "tvmconv.hoist_guards"  # conditions on thread and block indices alone move out of the loops
# No two buffers share memory: TVM's storage rewriting does not see what TMA reads and writes.
DISABLE_BUFFER_REUSE = "tvmconv.own_places"
