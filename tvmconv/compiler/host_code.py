"""Launches and workspace of the host code of a lowered module.

TVM lowers a function with several root loop nests to as many device functions. The host code launches them one after
another and allocates the buffers between them. A device function orders its parameters independently of the host, so
the array of each parameter is read from the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.compiler.executable import ArrayType
from tvmconv.compiler.tir_nodes import collect_nodes
from tvmconv.errors import CompileError
from tvmconv.tensor_map import ENCODE_FUNCTION, TensorMap

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

DYNAMIC_SHARED_PARAM = "tirx.use_dyn_shared_memory"  # TVM's launch parameter for dynamic shared memory in bytes

_LAUNCH_OP, _POINTER_OP, _FIELD_OP = "tirx.call_ffi_kernel", "tirx.buffer_data", "tirx.tvm_struct_get"
_PACKED_CALL_OP, _SET_DEVICE = "tirx.tvm_call_packed", "__tvm_set_device"


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a device function."""

    function: str  # symbol of the device function
    # buffer index of each parameter. Indices below the number of host arguments denote those, and larger ones the
    # workspace
    arguments: tuple[int, ...]
    # tensor map of each parameter over its buffer; None for a parameter that is an address
    tensor_maps: tuple[TensorMap | None, ...]
    dynamic_shared_bytes: int  # dynamic shared memory per block


@dataclass(frozen=True)
class HostCode:
    """Launches of a host function in order, and the buffers between the device functions."""

    launches: tuple[KernelLaunch, ...]
    workspace: tuple[ArrayType, ...]


def parse_host_function(function: PrimFunc, num_arguments: int) -> HostCode:
    """Parse a host function with a number of tensor arguments, before TVM finalizes it.

    It may only allocate, encode tensor maps and launch, and may not launch in a loop or under a condition.
    """
    visitor = _HostCodeVisitor(function, num_arguments)
    visitor.visit(function.body)
    if not visitor.launches:
        raise CompileError("the schedule runs nothing on the device: it binds no loop to threads or blocks")
    return HostCode(tuple(visitor.launches), tuple(visitor.workspace))


class _HostCodeVisitor:
    def __init__(self, function: PrimFunc, num_arguments: int) -> None:
        self._packed_arguments = function.params[1]  # the packed arguments of TVM's calling convention
        self._num_arguments = num_arguments
        self._array_indices: dict[Any, int] = {}  # buffer index by variable
        self._tensor_maps: dict[Any, TensorMap] = {}  # tensor map by variable
        self.launches: list[KernelLaunch] = []
        self.workspace: list[ArrayType] = []

    def visit(self, node: Any) -> None:
        match type(node).__name__:
            case "SeqStmt":
                for statement in node.seq:
                    self.visit(statement)
            case "AttrStmt":
                self.visit(node.body)
            case "Bind":
                self._bind_variable(node.var, node.value)
            case "DeclBuffer":
                self._bind_variable(node.buffer, node.data)
            case "AllocBuffer":
                self._record_workspace(node.buffer)
            case "Evaluate":
                self._visit_call(node.value)
            case "AssertStmt" | "Return":
                pass
            case "IfThenElse" if not _collect_calls(node, _LAUNCH_OP):  # a check of the arguments' strides
                for branch in (node.then_case, node.else_case):
                    if branch is not None:
                        self.visit(branch)
            case "For" | "While" | "IfThenElse" if _collect_calls(node, _LAUNCH_OP):
                raise CompileError("the schedule launches in a loop or under a condition of the host: bind the loop")
            case "For" | "While":
                raise CompileError("the schedule leaves a loop to the host: bind its loops to threads or blocks")
            case kind:
                raise CompileError(f"the schedule leaves a {kind} to the host: bind its loops to threads or blocks")

    def _bind_variable(self, variable: Any, value: Any) -> None:
        """Record the index of the argument or buffer that the value of a variable refers to."""
        from tvm import tirx

        fields = [call for call in _collect_calls(value, _FIELD_OP) if call.args[0].same_as(self._packed_arguments)]
        indices = (
            [int(fields[0].args[1])]
            if fields
            else [self._array_indices[v] for v in collect_nodes(value, tirx.Var) if v in self._array_indices]
        )
        if indices:
            self._array_indices[variable] = indices[0]

    def _record_workspace(self, buffer: Any) -> None:
        if (scope := str(buffer.scope())) not in ("", "global"):
            raise CompileError(
                f"the schedule allocates {buffer.name} in {scope} memory outside the loops that it binds to blocks and "
                "threads"
            )
        self._array_indices[buffer] = self._num_arguments + len(self.workspace)
        self.workspace.append(ArrayType(tuple(int(extent) for extent in buffer.shape), str(buffer.dtype)))

    def _visit_call(self, value: Any) -> None:
        op_name = str(value.op.name) if type(value).__name__ == "Call" else None
        if op_name == _LAUNCH_OP:
            self._record_launch(value)
        elif op_name == _PACKED_CALL_OP and str(value.args[0].value) == ENCODE_FUNCTION:
            _, variable, array, encoded_map = value.args
            self._bind_variable(variable, array)
            self._tensor_maps[variable] = TensorMap.from_json(str(encoded_map.value))
        elif op_name == _PACKED_CALL_OP and str(value.args[0].value) != _SET_DEVICE:
            raise CompileError(f"the schedule has the host call {value.args[0].value}")

    def _record_launch(self, call: Any) -> None:
        name, *operands = call.args
        launch_params = [str(parameter) for parameter in call.attrs.launch_params]
        arguments = operands[: len(operands) - len(launch_params)]
        param_values = dict(zip(launch_params, operands[len(arguments) :], strict=True))
        self.launches.append(
            KernelLaunch(
                function=str(name.value),
                arguments=tuple(self._find_array_index(argument, str(name.value)) for argument in arguments),
                tensor_maps=tuple(self._tensor_maps.get(argument) for argument in arguments),
                dynamic_shared_bytes=int(param_values.get(DYNAMIC_SHARED_PARAM, 0)),
            )
        )

    def _find_array_index(self, argument: Any, kernel: str) -> int:
        is_pointer = type(argument).__name__ == "Call" and argument.op.name == _POINTER_OP
        array = argument.args[0] if is_pointer else argument
        if array not in self._array_indices or (not is_pointer and array not in self._tensor_maps):
            raise CompileError(f"{kernel} takes {argument}, which is neither an argument nor a whole buffer")
        return self._array_indices[array]


def _collect_calls(node: Any, name: str) -> list[Any]:
    from tvm.ir import Call

    return [call for call in collect_nodes(node, Call) if str(call.op.name) == name]
