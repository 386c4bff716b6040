"""Schedules for tensor cores: by rewriting alone, each instruction written, on Hopper, and for first layers."""
