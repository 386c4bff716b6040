"""Performance analysis of built kernels without a GPU: occupancy, memory accesses, SASS, and predicted time.

The subpackages read a kernel's lowered TIR (`tir`), its machine code (`sass`), its accesses to memory (`memory`), and
Nsight Compute's counters (`nsight`). The modules of this package combine them into the reports of `tvmconv explain`.
"""
