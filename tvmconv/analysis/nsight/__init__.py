"""Nsight Compute: what it counts on a GPU, and what it would count."""
