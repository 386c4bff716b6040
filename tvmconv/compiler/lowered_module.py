"""Lowered modules: the device functions of a schedule, their source and their machine code.

TVM's CUDA runtime compiles the source of each module during code generation with the global function
`tvm_callback_cuda_compile`. That function is process-wide; `override_cuda_compiler` selects its implementation per
thread and task.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from tvmconv.annotations import MemoryScope
from tvmconv.compiler import memory_scopes, nvrtc
from tvmconv.compiler.executable import ArrayType, CompiledKernel, Executable, LaunchConfig
from tvmconv.compiler.nvrtc import Cubin
from tvmconv.compiler.source import (
    KernelParameter,
    declare_cluster,
    declare_one_block_per_multiprocessor,
    declare_tensor_maps,
    define_dot_products,
    pad_shared_arrays,
    uses_grid_dependency_wait,
    vectorize_half4_copies,
)
from tvmconv.errors import CompileError
from tvmconv.tensor_map import TensorMap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tvm.ir import IRModule
    from tvm.target import Target
    from tvm.tirx import PrimFunc


CudaCompiler = Callable[[str], bytes]

_CALLBACK_NAME = "tvm_callback_cuda_compile"
_active_compiler: ContextVar[CudaCompiler | None] = ContextVar("_chosen", default=None)


@contextmanager
def override_cuda_compiler(compiler: CudaCompiler) -> Iterator[None]:
    """Use a compiler to cubins for all CUDA sources that TVM generates in this thread or task within the block.

    An empty cubin is sufficient for a module that is inspected but not run.
    """
    _install_callback()
    token = _active_compiler.set(compiler)
    try:
        yield
    finally:
        _active_compiler.reset(token)


@functools.cache
def _install_callback() -> None:
    import tvm  # noqa: F401  registers the original function
    import tvm_ffi

    default_compiler = tvm_ffi.get_global_func(_CALLBACK_NAME)

    def compile_cuda(text: str) -> bytes:
        return (_active_compiler.get() or default_compiler)(text)

    tvm_ffi.register_global_func(_CALLBACK_NAME, compile_cuda, override=True)


@dataclass(frozen=True)
class LoweredKernel:
    """One device function with its launch parameters."""

    function: PrimFunc  # device function as TIR
    launch: LaunchConfig  # launch shape in the function
    parameters: tuple[KernelParameter, ...]  # pointers and tensor maps in the order of the function
    shared_bytes: int  # static shared memory per block
    dynamic_shared_bytes: int  # dynamic shared memory per block

    @property
    def name(self) -> str:
        """Symbol of the function in the source."""
        return str(self.function.attrs["global_symbol"])

    @functools.cached_property
    def text(self) -> str:
        """TVMScript of the function, which takes a tenth of a second to print if it is long."""
        return str(self.function.script())

    @property
    def arguments(self) -> tuple[int, ...]:
        """Buffer index of each parameter: first the arrays, then the workspace."""
        return tuple(parameter.index for parameter in self.parameters)

    @property
    def tensor_maps(self) -> tuple[tuple[int, TensorMap], ...]:
        """Position and map of each parameter that is a tensor map."""
        return _index_tensor_maps(self.parameters)


@dataclass(frozen=True)
class LoweredModule:
    """Device functions of a schedule with the data that are needed to run them."""

    target: Target  # TVM target
    kernels: tuple[LoweredKernel, ...]  # device functions in launch order, at least one
    arrays: tuple[ArrayType, ...]  # arguments of the PrimFunc: the inputs, then the output
    workspace: tuple[ArrayType, ...]  # memory between device functions
    memory_scopes: Mapping[str, MemoryScope]  # memory scope of each array by name
    num_prepack_kernels: int  # number of leading device functions that read only constant arguments
    host_module: IRModule  # host code, which checks arguments, allocates the workspace and launches
    device_module: IRModule  # module of the device functions
    _compile_lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)
    _cubins: list[Cubin] = field(default_factory=list, init=False, repr=False, compare=False)

    @functools.cached_property
    def source(self) -> str:
        """Generated CUDA or OpenCL source of all device functions; raises `CompileError` if TVM cannot generate it."""
        target_kind = self.target.kind.name
        try:
            with override_cuda_compiler(lambda text: b""):  # only the source is needed
                text = str(self._generate_code(self.device_module, self.target).inspect_source())
        except (ValueError, RuntimeError) as error:
            raise CompileError(f"TVM cannot write the kernel: {str(error).strip().splitlines()[-1]}") from error
        for kernel in self.kernels:
            text = declare_cluster(text, kernel.name, kernel.launch.cluster)
            text = declare_one_block_per_multiprocessor(text, kernel.name)
        parameters = {kernel.name: kernel.parameters for kernel in self.kernels}
        text = declare_tensor_maps(vectorize_half4_copies(pad_shared_arrays(text)))
        text = define_dot_products(text, target_kind)
        return memory_scopes.apply_memory_scopes(text, target_kind, self.memory_scopes, self.arrays, parameters)

    @property
    def cubin(self) -> Cubin:
        """Binary of a CUDA kernel from NVRTC; raises `CompileError` if the source does not compile."""
        return self.compile_cubin()

    def compile_cubin(self, *, with_lines: bool = False) -> Cubin:
        """Compile a CUDA kernel once and return its binary; raises `CompileError` if the source does not compile.

        Args:
            with_lines: Include source lines of instructions, unless the binary was already compiled.
        """
        with self._compile_lock:
            if not self._cubins:
                arch = str(self.target.attrs["arch"])
                self._cubins.append(nvrtc.compile_cubin(self.source, arch, with_lines=with_lines))
        return self._cubins[0]

    @functools.cached_property
    def executable(self) -> Executable:
        """Executable for a device; raises `CompileError` if the source of a CUDA kernel does not compile."""
        cubin = self.cubin if self.target.kind.name == "cuda" else None
        binary = cubin.image if cubin else self.source.encode()
        kernels = tuple(self._make_compiled_kernel(kernel, binary, cubin) for kernel in self.kernels)
        return Executable(kernels, self.arrays, self.workspace, self.num_prepack_kernels)

    def _make_compiled_kernel(self, kernel: LoweredKernel, code: bytes, cubin: Cubin | None) -> CompiledKernel:
        scope_by_index = dict(enumerate(self.memory_scopes.values()))
        symbols = {p.index: p.name for p in kernel.parameters if cubin and scope_by_index.get(p.index) == "constant"}
        parameters = [p for p in kernel.parameters if p.index not in symbols]
        return CompiledKernel(
            code=code,
            name=kernel.name,
            launch=kernel.launch,
            arguments=tuple(p.index for p in parameters),
            shared_bytes=kernel.shared_bytes,
            dynamic_shared_bytes=kernel.dynamic_shared_bytes,
            constants=tuple(symbols.items()),
            textures=tuple(i for i in sorted(kernel.arguments) if scope_by_index.get(i) == "texture"),
            tensor_maps=_index_tensor_maps(parameters),
            uses_pdl=cubin is not None and uses_grid_dependency_wait(self.source, kernel.name),
            resources=cubin.kernels[kernel.name] if cubin else None,
        )

    def build_runtime_module(self) -> Any:
        """Return a CUDA kernel as a runtime module of TVM, whose `main` takes DLPack tensors.

        Raises:
            CompileError: NVRTC rejects the kernel, an argument is not in global memory, or a parameter is a tensor map.
        """
        for kernel in self.kernels:
            if kernel.tensor_maps:
                raise CompileError(f"{kernel.name} takes tensor maps, which TVM's runtime does not encode")
        for name, scope in self.memory_scopes.items():
            if scope != "global":
                scope_name = _SCOPE_NAMES[scope]
                raise CompileError(f"TVM's runtime does not support {name} in {scope_name}: expected global memory")
        host_module = self._generate_code(self.host_module, self.target.host)
        with override_cuda_compiler(lambda text: self.cubin.image):
            host_module.import_module(self._generate_code(self.device_module, self.target))
        return host_module

    @staticmethod
    def _generate_code(mod: IRModule, target: Target) -> Any:
        import tvm

        with (
            target
        ):  # otherwise TVM queries a GPU for its architecture, which takes far longer than the code generation
            return tvm.get_global_func(f"target.build.{target.kind.name}")(mod, target)


def _index_tensor_maps(parameters: Sequence[KernelParameter]) -> tuple[tuple[int, TensorMap], ...]:
    return tuple((index, parameter.tensor_map) for index, parameter in enumerate(parameters) if parameter.tensor_map)


_SCOPE_NAMES = {"constant": "constant memory", "texture": "a texture"}
