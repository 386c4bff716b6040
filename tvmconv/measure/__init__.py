"""Measuring: configs built, verified and timed in processes that may die of it."""
