"""The translation of a Relax function to the graph of a model, in which epilogues are assigned to convolutions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, IRModule, Op

from tvmconv.errors import WorkloadError
from tvmconv.models.model_graph import ModelGraph, ModelOp, Operand, Shape, make_convolution
from tvmconv.workloads.conv_operator import ConvOperator

BINARY_OPS = {
    "relax.add": "add",
    "relax.subtract": "sub",
    "relax.multiply": "mul",
    "relax.divide": "div",
    "relax.minimum": "min",
    "relax.maximum": "max",
}
UNARY_OPS = {
    "relax.nn.relu": "relu",
    "relax.nn.silu": "silu",
    "relax.nn.gelu": "gelu",
    "relax.nn.gelu_tanh": "gelu_tanh",
    "relax.sigmoid": "sigmoid",
    "relax.tanh": "tanh",
    "relax.exp": "exp",
    "relax.erf": "erf",
    "relax.negative": "neg",
}
NORM_OP = "relax.nn.batch_norm"
CONV_OPS = {
    f"relax.nn.conv{ndim}d{suffix}": (ndim, suffix == "_transpose")
    for ndim in (1, 2, 3)
    for suffix in ("", "_transpose")
}
SPATIAL_AXES = {1: "W", 2: "HW", 3: "DHW"}


@dataclass
class RelaxGraph:
    """The graph of a Relax function, and the Relax expressions behind its names and operations."""

    graph: ModelGraph = field(default_factory=ModelGraph)
    exprs: dict[str, relax.Expr] = field(default_factory=dict)  # by the name of a tensor in the graph
    bindings: dict[int, relax.Binding] = field(default_factory=dict)  # by the index of an operation in the graph
    results: dict[str, relax.Var] = field(default_factory=dict)  # variable that has a tensor of the graph

    def find_constant(self, name: str) -> NDArray[Any] | None:
        """Return the elements of a constant by its name in the graph; None if the tensor is computed."""
        expr = self.exprs[name]
        return expr.value.numpy() if isinstance(expr, GenericConst) else None


def read_function(function: relax.Function) -> RelaxGraph:
    """Return the graph of a Relax function. Operations that no epilogue contains have no kind."""
    return _GraphReader().read(function)


def list_sizes(expr: relax.Expr) -> Shape | None:
    """Return the sizes of a tensor; None if the expression is no tensor or a size is symbolic."""
    shape = getattr(expr.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr) or not all(isinstance(size, tirx.IntImm) for size in shape):
        return None
    return tuple(int(size) for size in shape)


def count_readers(mod: IRModule) -> Counter[relax.Expr]:
    """Return the number of bindings, and of results of functions, that read each variable of a module."""
    counts: Counter[relax.Expr] = Counter()
    for function in mod.functions.values():
        if not isinstance(function, relax.Function):
            continue
        bindings = (binding.value for block in function.body.blocks for binding in block.bindings)
        for value in (*bindings, function.body.body):
            read: set[relax.Expr] = set()
            relax.analysis.post_order_visit(value, lambda node, read=read: read.add(node))
            counts.update(node for node in read if isinstance(node, relax.Var))
    return counts


def is_foldable_norm(call: Call) -> bool:
    """Return whether a batch normalization of the channels is in inference mode, with constant parameters."""
    is_inference = not getattr(call.attrs, "training", False)
    return int(call.attrs.axis) == 1 and is_inference and all(isinstance(arg, GenericConst) for arg in call.args[1:])


class _GraphReader:
    """A reader of one function. It names variables by their number, because Relax's names need not be unique."""

    def __init__(self) -> None:
        self._result = RelaxGraph()
        self._names: dict[relax.Expr, str] = {}

    def read(self, function: relax.Function) -> RelaxGraph:
        for parameter in function.params:
            self._name_expr(parameter)
        for block in function.body.blocks:
            for binding in block.bindings:
                self._add_binding(binding)
        self._result.graph.outputs.update(self._list_reads(function.body.body))
        return self._result

    def _name_expr(self, expr: relax.Expr) -> str:
        """Return the name of a variable or a constant, which is new at the first call."""
        if expr not in self._names:
            name = self._names[expr] = f"value{len(self._names)}"
            self._result.exprs[name] = expr
            if (shape := list_sizes(expr)) is not None:
                self._result.graph.shapes[name] = shape
            if isinstance(expr, GenericConst):
                self._result.graph.constants.add(name)
            else:
                self._result.results[name] = expr
        return self._names[expr]

    def _add_binding(self, binding: relax.Binding) -> None:
        graph, value = self._result.graph, binding.value
        num_ops = len(graph.ops)
        if isinstance(value, relax.TupleGetItem) and self._alias_norm(binding.var, value):
            return
        name = value.op.name if isinstance(value, Call) and isinstance(value.op, Op) else ""
        if name in CONV_OPS:
            self._add_conv(binding.var, value)
        elif name == NORM_OP and is_foldable_norm(value):
            reads = tuple(map(self._name_expr, value.args))
            graph.ops.append(ModelOp("norm", reads, (self._name_expr(binding.var),)))
            graph.shapes[self._name_expr(binding.var)] = graph.shapes.get(reads[0], ())
        elif (pointwise := _read_pointwise(name, value)) is not None:
            kind, options, num_operands = pointwise
            operands = [self._read_operand(arg) for arg in value.args[:num_operands]]
            graph.add_pointwise(kind, operands, (self._name_expr(binding.var),), **options)
        else:
            graph.ops.append(ModelOp("", tuple(self._list_reads(value)), (self._name_expr(binding.var),)))
        for index in range(num_ops, len(graph.ops)):
            self._result.bindings[index] = binding
            graph.constants.difference_update(graph.ops[index].writes)  # only elements that are known can be folded

    def _alias_norm(self, variable: relax.Var, item: relax.TupleGetItem) -> bool:
        """Name the first item of a normalization like its operation, and return whether it was one."""
        name = self._names.get(item.tuple_value)
        op = next((op for op in reversed(self._result.graph.ops) if name in op.writes), None)
        if item.index != 0 or name is None or op is None or op.kind != "norm":
            return False
        self._names[variable] = name
        self._result.exprs[name] = self._result.results[name] = variable
        return True

    def _add_conv(self, variable: relax.Var, call: Call) -> None:
        reads = tuple(map(self._name_expr, call.args))
        label = str(variable.name)
        self._result.graph.add_conv(label, reads, (self._name_expr(variable),), lambda: read_convolution(call))

    def _read_operand(self, expr: relax.Expr) -> Operand:
        if isinstance(expr, GenericConst) and list_sizes(expr) == ():
            return float(expr.value.numpy())
        return self._name_expr(expr)

    def _list_reads(self, expr: relax.Expr) -> list[str]:
        """Return the names of the tensors that an expression reads, those in nested functions included."""
        names: dict[str, None] = {}

        def visit(node: Any) -> None:
            if isinstance(node, (relax.Var, GenericConst)):
                names[self._name_expr(node)] = None

        relax.analysis.post_order_visit(expr, visit)
        return list(names)


def _read_pointwise(name: str, call: Any) -> tuple[str, dict[str, float], int] | None:
    """Return the pointwise function of a call, its options and its number of operands; None for another call."""
    if name in BINARY_OPS:
        return BINARY_OPS[name], {}, 2
    if name in UNARY_OPS:
        return UNARY_OPS[name], {}, 1
    if name == "relax.nn.leakyrelu":
        return "leaky_relu", {"slope": float(call.attrs.alpha)}, 1
    if name == "relax.clip":
        return "clip", {"low": read_number(call.args[1]), "high": read_number(call.args[2])}, 1
    return None


def read_number(expr: Any) -> float:
    """Return the number of a constant expression that is no tensor."""
    while hasattr(expr, "value"):
        expr = expr.value
    return float(expr)


def read_convolution(call: Call) -> ConvOperator:
    """Return the workload of a convolution of Relax with channels first, without an epilogue.

    Raises:
        WorkloadError: A size is symbolic, the layout or the output's dtype is not supported, or no workload has the
            sizes and dtype.
    """
    ndim, is_transposed = CONV_OPS[call.op.name]
    axes, attrs = SPATIAL_AXES[ndim], call.attrs
    expected = (f"NC{axes}", f"{'IO' if is_transposed else 'OI'}{axes}", f"NC{axes}")
    layouts = tuple(map(str, (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)))
    if layouts != expected:
        raise WorkloadError(f"layouts {' '.join(layouts)}: expected {' '.join(expected)}")
    x, weight = map(list_sizes, call.args)
    if x is None or weight is None:
        raise WorkloadError("a size is symbolic: expected numbers, or batch_sizes for a symbolic batch")
    dtype, result_dtype = str(call.args[0].ty.dtype), str(call.ty.dtype)
    if result_dtype != dtype:
        raise WorkloadError(f"the output is {result_dtype}: expected {dtype}, as the input")
    return make_convolution(
        x,
        weight,
        stride=_list_numbers(attrs.strides),
        padding=_list_numbers(attrs.padding),
        dilation=_list_numbers(attrs.dilation),
        groups=int(attrs.groups),
        dtype=dtype,
        bias=False,
        output_padding=_list_numbers(attrs.output_padding) if is_transposed else None,
    )


def _list_numbers(numbers: Any) -> Shape:
    return tuple(int(number) for number in numbers)
