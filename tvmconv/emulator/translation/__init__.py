"""TIR translated to Python functions, once, that are called as often as it runs."""
