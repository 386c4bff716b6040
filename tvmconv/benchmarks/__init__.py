"""Benchmarks that users repeat on their own device; `tvmconv bench NAME` runs the module NAME.

Each module has `add_options(parser)` and `run(args) -> exit status`. Its docstring is the text of `tvmconv bench NAME
--help`. Only `tvmconv/cli/bench.py` imports these modules, by name; a module can be deleted with its line there.
"""
