"""The import of TVM's tensor intrinsics in seconds instead of a minute or more."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

PACKAGE = "tvm.s_tir.tensor_intrin"
_CUDA_MODULES = ("dot_product_common", "cuda")  # in the order in which one imports another
_LLVM_MODULES = ("arm_cpu", "x86", "rocm", "hexagon", "riscv_cpu")  # the package imports them if TVM has LLVM


def import_tensor_intrinsics() -> None:
    """Import TVM's tensor intrinsics, as TVM's rule for tensor cores does when it first schedules a product in float16.

    The ordinary import takes a minute or more: it parses some 180 functions, TVM asks `inspect.stack` for the stack of
    calls of each, and `inspect` looks through all imported modules, some 2,000, for every frame of the import system,
    because these frames have no file. This function executes the modules without such frames on the stack, as
    importlib's documentation shows for a source file, which takes seconds. Where a release of TVM has other modules,
    the ordinary import takes its time. `tvmconv` calls it in processes of its own only.

    Examples:
        >>> import tvmconv.relax
        >>> tvmconv.relax.import_tensor_intrinsics()  # doctest: +SKIP
        >>> executable = tvm.compile(mod, target)  # doctest: +SKIP
    """
    if PACKAGE in sys.modules:
        return
    import tvm

    created: list[str] = []
    try:
        package, package_spec = _create_module(PACKAGE, created)
        for name in (*_CUDA_MODULES, *(_LLVM_MODULES if tvm.runtime.enabled("llvm") else ())):
            module, spec = _create_module(f"{PACKAGE}.{name}", created)
            _execute_module(module, spec)
            setattr(package, name, module)
        _execute_module(package, package_spec)
        setattr(sys.modules[PACKAGE.rpartition(".")[0]], PACKAGE.rpartition(".")[2], package)
    except ImportError:
        for name in created:
            del sys.modules[name]
        importlib.import_module(PACKAGE)


def _create_module(name: str, created: list[str]) -> tuple[ModuleType, ModuleSpec]:
    """Return a module without its contents and its specification, and append its name to a list."""
    spec = importlib.util.find_spec(name)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise ImportError(f"{name} is no source file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    created.append(name)
    return module, spec


def _execute_module(module: ModuleType, spec: ModuleSpec) -> None:
    assert isinstance(spec.loader, SourceFileLoader)
    code = spec.loader.get_code(module.__name__)
    assert code is not None  # there is a source file
    exec(code, module.__dict__)
