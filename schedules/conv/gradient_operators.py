"""Names of the gradients and of transposed convolutions."""

DGRAD = ("conv1d_dgrad", "conv2d_dgrad", "conv3d_dgrad")
WGRAD = ("conv1d_wgrad", "conv2d_wgrad", "conv3d_wgrad")
TRANSPOSE = ("conv1d_transpose", "conv2d_transpose", "conv3d_transpose")
ALL = (*DGRAD, *WGRAD, *TRANSPOSE)
