"""Analysis of a kernel's memory accesses from its TIR: bank conflicts, coalescing, DRAM traffic and TMA swizzles."""
