"""`bias` adds one number per output channel, and `add` adds a residual, a tensor of the output's shape."""

import operator

from tvmconv.workloads.epilogue import EpilogueOp, register_op

register_op(EpilogueOp("bias", lambda value, bias: value + bias, operator.add, "channel", is_addition=True))
register_op(EpilogueOp("add", lambda value, residual: value + residual, operator.add, "output", is_addition=True))
