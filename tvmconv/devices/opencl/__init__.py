"""OpenCL devices through pyopencl."""
