"""What emulated threads access: arrays, registers and shared memory, and what each knows of the others' accesses."""
