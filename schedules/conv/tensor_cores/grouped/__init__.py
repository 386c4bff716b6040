"""Gradients of grouped convolutions of few channels per group on tensor cores."""
