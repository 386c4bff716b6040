"""`add`: a residual is added, a tensor like the output."""

from tvmconv.workloads.epilogue import Operation, register

register(
    Operation(
        "add",
        compute=lambda value, residual: value + residual,
        reference=lambda y, residual: y + residual,
        takes="output",
        adds=True,
    )
)
