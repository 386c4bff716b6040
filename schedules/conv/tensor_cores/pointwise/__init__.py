"""Gradients of inputs of narrow 1×1 layers: pixels stream through registers."""
