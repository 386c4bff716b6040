"""A lowered kernel's threads, emulated with NumPy: who asks for it takes `execute`, or `observe` and a `watch`."""
