"""What the host side of a lowered module does: which device functions it launches, on what, and with what between them.

TVM lowers a function with several root loop nests to as many device functions, which the host launches one after
another; the buffers between them it allocates there. A device function's parameters keep no order of the host's: which
array goes where is read off the launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.compiler.program import ArrayType
from tvmconv.errors import CompileError
from tvmconv.tensor_map import ENCODE, TensorMap

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

DYNAMIC_SHARED = "tirx.use_dyn_shared_memory"  # a launch parameter of TVM: bytes

_LAUNCH, _POINTER, _FIELD = "tirx.call_ffi_kernel", "tirx.buffer_data", "tirx.tvm_struct_get"
_PACKED, _SET_DEVICE = "tirx.tvm_call_packed", "__tvm_set_device"


@dataclass(frozen=True)
class Call:
    """One launch.

    Attributes:
        function: the device function's symbol.
        arguments: for each of its parameters, the index of an argument of the host function, or behind these of one of
            its scratch buffers.
        tensor_maps: for each of its parameters the map over that argument or buffer that it takes; None for its
            address.
        dynamic_shared_bytes: shared memory of a block that it asks for.
    """

    function: str
    arguments: tuple[int, ...]
    tensor_maps: tuple[TensorMap | None, ...]
    dynamic_shared_bytes: int


@dataclass(frozen=True)
class Host:
    """The host side.

    Attributes:
        calls: the launches, in their order.
        scratch: the buffers between them.
    """

    calls: tuple[Call, ...]
    scratch: tuple[ArrayType, ...]


def read(function: PrimFunc, arguments: int) -> Host:
    """What a host function does that takes so many tensors, before TVM finalizes it.

    Raises:
        CompileError: it launches in a loop or under a condition, or does more than to allocate, to describe arrays by
            tensor maps and to launch; or TMA cannot take a map.
    """
    reader = _Reader(function, arguments)
    reader.visit(function.body)
    if not reader.calls:
        raise CompileError("the schedule runs nothing on the device: it binds no loop to threads or blocks")
    return Host(tuple(reader.calls), tuple(reader.scratch))


class _Reader:
    def __init__(self, function: PrimFunc, arguments: int) -> None:
        self._packed = function.params[1]  # the arguments, as TVM's runtime hands them over
        self._arguments = arguments
        self._known: dict[Any, int] = {}  # variables that stand for an argument or a scratch buffer, by their index
        self._maps: dict[Any, TensorMap] = {}  # those that stand for a map over it
        self.calls: list[Call] = []
        self.scratch: list[ArrayType] = []

    def visit(self, node: Any) -> None:
        """Read a statement and those in it, in their order."""
        match type(node).__name__:
            case "SeqStmt":
                for statement in node.seq:
                    self.visit(statement)
            case "AttrStmt":
                self.visit(node.body)
            case "Bind":
                self._name(node.var, node.value)
            case "DeclBuffer":
                self._name(node.buffer, node.data)
            case "AllocBuffer":
                self._allocate(node.buffer)
            case "Evaluate":
                self._evaluate(node.value)
            case "AssertStmt" | "Return":
                pass
            case "IfThenElse" if not _calls(node, _LAUNCH):  # of the arguments' strides
                for branch in (node.then_case, node.else_case):
                    if branch is not None:
                        self.visit(branch)
            case "For" | "While" | "IfThenElse" if _calls(node, _LAUNCH):
                raise CompileError("the schedule launches in a loop or under a condition of the host: bind the loop")
            case kind:
                raise CompileError(f"the schedule leaves a {kind} to the host: bind its loops to threads or blocks")

    def _name(self, variable: Any, value: Any) -> None:
        """Learn what a variable stands for: for the argument or buffer that its value has in it."""
        fields = [call for call in _calls(value, _FIELD) if call.args[0].same_as(self._packed)]
        of = [int(fields[0].args[1])] if fields else [self._known[v] for v in _variables(value) if v in self._known]
        if of:
            self._known[variable] = of[0]

    def _allocate(self, buffer: Any) -> None:
        if (scope := str(buffer.scope())) not in ("", "global"):
            raise CompileError(
                f"the schedule allocates {buffer.name} in {scope} memory outside the loops that it binds to blocks and "
                "threads"
            )
        self._known[buffer] = self._arguments + len(self.scratch)
        self.scratch.append(ArrayType(tuple(int(extent) for extent in buffer.shape), str(buffer.dtype)))

    def _evaluate(self, value: Any) -> None:
        called = str(value.op.name) if type(value).__name__ == "Call" else None
        if called == _LAUNCH:
            self._launch(value)
        elif called == _PACKED and str(value.args[0].value) == ENCODE:
            _, variable, array, told = value.args
            self._name(variable, array)
            self._maps[variable] = TensorMap.from_json(str(told.value))
        elif called == _PACKED and str(value.args[0].value) != _SET_DEVICE:
            raise CompileError(f"the schedule has the host call {value.args[0].value}")

    def _launch(self, call: Any) -> None:
        name, *passed = call.args
        launch = [str(parameter) for parameter in call.attrs.launch_params]
        given = passed[: len(passed) - len(launch)]
        sizes = dict(zip(launch, passed[len(given) :], strict=True))
        self.calls.append(
            Call(
                function=str(name.value),
                arguments=tuple(self._index(argument, str(name.value)) for argument in given),
                tensor_maps=tuple(self._maps.get(argument) for argument in given),
                dynamic_shared_bytes=int(sizes.get(DYNAMIC_SHARED, 0)),
            )
        )

    def _index(self, argument: Any, kernel: str) -> int:
        whole = type(argument).__name__ == "Call" and argument.op.name == _POINTER
        of = argument.args[0] if whole else argument
        if of not in self._known or (not whole and of not in self._maps):
            raise CompileError(f"{kernel} takes {argument}, which is no argument and no buffer as a whole")
        return self._known[of]


def _calls(node: Any, name: str) -> list[Any]:
    """The calls of one operator in a statement or an expression."""
    import tvm_ffi
    from tvm.ir import Call as TirCall

    found: list[Any] = []
    tvm_ffi.structural_walk(node, (TirCall, found.append), order="post")
    return [call for call in found if str(call.op.name) == name]


def _variables(expression: Any) -> list[Any]:
    import tvm_ffi
    from tvm import tirx

    found: list[Any] = []
    tvm_ffi.structural_walk(expression, (tirx.Var, found.append), order="post")
    return found
