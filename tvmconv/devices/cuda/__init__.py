"""NVIDIA GPUs through the CUDA driver and runtime."""
