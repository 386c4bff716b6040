"""What kernels are compared with."""
