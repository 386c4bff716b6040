"""PoCL compiles a kernel in a tenth of its time.

Its header declares all 18,000 functions of OpenCL C, for which its compiler takes 0.13 s, ten times as long as for a
small kernel. Kernels of this process are compiled with the few that they call. What calls another one does not compile,
with its name: it then has to be declared in tests/data/opencl_functions.h.
"""

from pathlib import Path

FUNCTIONS = Path(__file__).parents[1] / "data" / "opencl_functions.h"
ALL_DECLARED = "_OPENCL_H_"  # the guard of the header that PoCL reads otherwise


def install():
    """Let every program of this process see the functions of `FUNCTIONS` alone, where PoCL compiles it."""
    try:
        import pyopencl as cl
    except ImportError:  # a machine with a GPU and CUDA alone
        return
    if not any("pocl" in platform.name.lower() or "Portable" in platform.name for platform in cl.get_platforms()):
        return

    class LeanProgram(cl.Program):
        def __init__(self, context, text):
            super().__init__(context, f"{FUNCTIONS.read_text()}\n{text}")

        def build(self, options=(), **how):
            return super().build([*options, f"-D{ALL_DECLARED}", "-w"], **how)

    cl.Program = LeanProgram
