"""Emulator of CUDA-like TIR, which executes a lowered kernel's threads with NumPy on a machine without a GPU.

`execution.execute` runs a kernel on arrays and raises an error for races and out-of-bounds accesses. Tests use it to
verify tensor-core kernels, and `tvmconv.analysis` counts memory accesses with it (`observation.run_with_observer`). No
core package imports the emulator. It can be deleted once the tests of tensor-core schedules always run on a GPU with
compute-sanitizer, and the SASS interpreter of `tvmconv.analysis` counts the accesses of TMA and wgmma.
"""
