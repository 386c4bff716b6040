"""What lowering comes to: the device functions of a schedule, their text, and their machine code."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from tvmconv.compiler import nvrtc, spaces
from tvmconv.compiler.hook import compile_with
from tvmconv.compiler.program import ArrayType, Launch, Program, Step
from tvmconv.compiler.source import (
    Parameter,
    copy_fours_whole,
    declare_cluster,
    declare_tensor_maps,
    fill_alignment,
    waits_for_the_grid_before,
)
from tvmconv.errors import CompileError
from tvmconv.marks import Space
from tvmconv.tensor_map import TensorMap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tvm.ir import IRModule
    from tvm.target import Target
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.nvrtc import Cubin


@dataclass(frozen=True)
class LoweredStep:
    """One device function, and what it takes to launch it.

    Attributes:
        function: the device function (TIR).
        launch: grid and block, read off the function.
        parameters: the pointers and tensor maps that it takes, in its order.
        shared_bytes: static shared memory of a block.
        dynamic_shared_bytes: shared memory of a block that the launch asks for.
    """

    function: PrimFunc
    launch: Launch
    parameters: tuple[Parameter, ...]
    shared_bytes: int
    dynamic_shared_bytes: int

    @property
    def name(self) -> str:
        """The kernel's symbol in the source."""
        return str(self.function.attrs["global_symbol"])

    @functools.cached_property
    def text(self) -> str:
        """The function as TVM prints it, which takes a tenth of a second where it is long."""
        return str(self.function.script())

    @property
    def arguments(self) -> tuple[int, ...]:
        """For each parameter the index of the array that goes there, or behind the arrays of the scratch memory."""
        return tuple(parameter.index for parameter in self.parameters)

    @property
    def tensor_maps(self) -> tuple[tuple[int, TensorMap], ...]:
        """The parameters that are tensor maps over these: the position and the map of each."""
        return _tensor_maps(self.parameters)


@dataclass(frozen=True)
class Lowered:
    """The device functions of a schedule, and what is needed to run them.

    Attributes:
        target: the TVM target.
        steps: in the order in which they are launched, at least one.
        arrays: the PrimFunc's arguments, inputs first and the output last.
        scratch: memory that steps leave for later ones.
        spaces: where each of the arrays lies, by its name.
        prepared: how many steps, at the beginning, read nothing but arguments that stay as they are.
        host: the host side, which checks arguments, allocates scratch memory and launches.
        device: the module of the device functions alone.
    """

    target: Target
    steps: tuple[LoweredStep, ...]
    arrays: tuple[ArrayType, ...]
    scratch: tuple[ArrayType, ...]
    spaces: Mapping[str, Space]
    prepared: int
    host: IRModule
    device: IRModule
    _making: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)
    _made: list[Cubin] = field(default_factory=list, init=False, repr=False, compare=False)

    @functools.cached_property
    def source(self) -> str:
        """The generated CUDA or OpenCL text, of all steps; raises `CompileError` when TVM cannot write it."""
        kind = self.target.kind.name
        try:
            with compile_with(lambda text: b""):  # only the text is wanted
                text = str(self._codegen(self.device, self.target).inspect_source())
        except (ValueError, RuntimeError) as error:
            raise CompileError(f"TVM cannot write the kernel: {str(error).strip().splitlines()[-1]}") from error
        for step in self.steps:
            text = declare_cluster(text, step.name, step.launch.cluster)
        kernels = {step.name: step.parameters for step in self.steps}
        text = declare_tensor_maps(copy_fours_whole(fill_alignment(text)))
        return spaces.apply(text, kind, self.spaces, self.arrays, kernels)

    @property
    def cubin(self) -> Cubin:
        """The binary of a CUDA kernel, from NVRTC; raises `CompileError` when it does not compile."""
        return self.compiled()

    def compiled(self, *, lines: bool = False) -> Cubin:
        """The binary of a CUDA kernel, which is made once, whoever asks; raises as `cubin`.

        Args:
            lines: it is to tell of each instruction which line of the text it is of, if it has yet to be made.
        """
        with self._making:
            if not self._made:
                self._made.append(nvrtc.compile_cubin(self.source, str(self.target.attrs["arch"]), lines=lines))
        return self._made[0]

    @functools.cached_property
    def program(self) -> Program:
        """What a device loads; raises `CompileError` when the text of a CUDA kernel does not compile."""
        cubin = self.cubin if self.target.kind.name == "cuda" else None
        code = cubin.image if cubin else self.source.encode()
        steps = tuple(self._compiled(step, code, cubin) for step in self.steps)
        return Program(steps, self.arrays, self.scratch, self.prepared)

    def _compiled(self, step: LoweredStep, code: bytes, cubin: Cubin | None) -> Step:
        placed = dict(enumerate(self.spaces.values()))
        constants = {p.index: p.name for p in step.parameters if cubin and placed.get(p.index) == "constant"}
        parameters = [p for p in step.parameters if p.index not in constants]
        return Step(
            code=code,
            name=step.name,
            launch=step.launch,
            arguments=tuple(p.index for p in parameters),
            shared_bytes=step.shared_bytes,
            dynamic_shared_bytes=step.dynamic_shared_bytes,
            constants=tuple(constants.items()),
            textures=tuple(i for i in sorted(step.arguments) if placed.get(i) == "texture"),
            tensor_maps=_tensor_maps(parameters),
            overlaps=cubin is not None and waits_for_the_grid_before(self.source, step.name),
            resources=cubin.kernels[step.name] if cubin else None,
        )

    def executable(self) -> Any:
        """A CUDA kernel as a runtime module of TVM, callable on DLPack tensors through its `main`.

        Raises:
            CompileError: NVRTC rejects the kernel, an argument does not lie in global memory, or the kernel takes
                tensor maps.
        """
        for step in self.steps:
            if step.tensor_maps:
                raise CompileError(f"{step.name} takes tensor maps, which TVM's runtime does not encode")
        for name, space in self.spaces.items():
            if space != "global":
                raise CompileError(f"{name} is placed in {_PLACES[space]}, which TVM's runtime cannot do")
        host = self._codegen(self.host, self.target.host)
        with compile_with(lambda text: self.cubin.image):
            host.import_module(self._codegen(self.device, self.target))
        return host

    @staticmethod
    def _codegen(mod: IRModule, target: Target) -> Any:
        import tvm

        with target:  # TVM asks a GPU for its architecture otherwise, which takes far longer than generating the text
            return tvm.get_global_func(f"target.build.{target.kind.name}")(mod, target)


def _tensor_maps(parameters: Sequence[Parameter]) -> tuple[tuple[int, TensorMap], ...]:
    return tuple((at, each.tensor_map) for at, each in enumerate(parameters) if each.tensor_map)


_PLACES = {"constant": "constant memory", "texture": "a texture"}
