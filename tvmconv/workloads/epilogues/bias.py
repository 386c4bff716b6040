"""`bias`: the addition of one number per output channel."""

from tvmconv.workloads.epilogue import EpilogueOp, register_op

register_op(
    EpilogueOp(
        "bias",
        compute=lambda value, bias: value + bias,
        reference=lambda y, bias: y + bias,
        argument_kind="channel",
        is_addition=True,
    )
)
