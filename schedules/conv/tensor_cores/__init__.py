"""Tensor-core schedules: by rewriting alone, with each instruction emitted, for Hopper, and for first layers."""
