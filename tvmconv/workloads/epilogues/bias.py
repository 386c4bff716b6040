"""`bias`: a number for each output channel is added."""

from tvmconv.workloads.epilogue import Operation, register

register(
    Operation(
        "bias",
        compute=lambda value, bias: value + bias,
        reference=lambda y, bias: y + bias,
        takes="channel",
        adds=True,
    )
)
