"""Gradients and transposed convolutions by the schedules of convolutions, on every device."""
