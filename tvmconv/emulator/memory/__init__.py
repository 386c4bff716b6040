"""Memory of emulated threads: arrays, registers and shared memory, with the order of accesses to find races."""
