"""NVIDIA GPUs, through CUDA's driver and runtime."""
