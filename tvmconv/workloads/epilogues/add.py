"""`add`: a residual is added, a tensor like the output."""

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
