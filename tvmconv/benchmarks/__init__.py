"""Measurements that users repeat on their own device; `tvmconv bench NAME` runs the module NAME.

Each module has `add_options(parser)` and `run(args) -> exit status`; its docstring says what it is for, and is the text
of `tvmconv bench NAME --help`. Nothing else in tvmconv imports this package: delete a module, and its line in
`tvmconv/cli/bench.py`, when nobody repeats its measurement.
"""
