"""PoCL compiles a kernel in a tenth of its time.

Its header declares all 18,000 functions of OpenCL C, for which its compiler takes 0.13 s, ten times as long as for a
small kernel. Kernels of this process, and of those that it starts, are compiled with the few that they call. What calls
another one does not compile, with its name: it then has to be declared in tests/data/opencl_functions.h.
"""

import functools
import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

CHILDREN = Path(__file__).parent / "children"  # has what Python runs in each process, where its path has this folder
FUNCTIONS = Path(__file__).parents[1] / "data" / "opencl_functions.h"
ALL_DECLARED = "_OPENCL_H_"  # the guard of the header that PoCL reads otherwise


@functools.cache  # it holds what PoCL is given
def _pocl():
    """The project's module, which needs no other, also where a test keeps the project from being imported."""
    path = Path(__file__).parents[2] / "tvmconv/devices/opencl/pocl.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install():
    """Let every program of this process see the functions of `FUNCTIONS` alone, where PoCL compiles it."""
    try:
        import pyopencl as cl
    except ImportError:  # a machine with a GPU and CUDA alone
        return
    _pocl().name_the_processor()  # before PoCL is first asked
    if cl.Program.__name__ == "LeanProgram":  # this process was started by tests, and runs some itself
        return
    if not any("pocl" in platform.name.lower() or "Portable" in platform.name for platform in cl.get_platforms()):
        return

    class LeanProgram(cl.Program):
        def __init__(self, context, text):
            super().__init__(context, f"{FUNCTIONS.read_text()}\n{text}")

        def build(self, options=(), **how):
            return super().build([*options, f"-D{ALL_DECLARED}", "-w"], **how)

    cl.Program = LeanProgram


def install_in_children():
    """Let every program of the processes that this one starts do so, too."""
    paths = [str(CHILDREN), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))


def install_once_imported():
    """`install` as soon as pyopencl is imported, if it ever is."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != "pyopencl":
            return None
        sys.meta_path.remove(self)
        if found := importlib.util.find_spec(fullname):
            execute = found.loader.exec_module

            def execute_and_install(module):
                execute(module)
                install()

            found.loader.exec_module = execute_and_install
        return found
