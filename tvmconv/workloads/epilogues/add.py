"""`add`: the addition of a residual, a tensor of the output's shape."""

from tvmconv.workloads.epilogue import EpilogueOp, register_op

register_op(
    EpilogueOp(
        "add",
        compute=lambda value, residual: value + residual,
        reference=lambda y, residual: y + residual,
        argument_kind="output",
        is_addition=True,
    )
)
