"""Grouped convolutions of few channels per group, and their gradients, on tensor cores."""
