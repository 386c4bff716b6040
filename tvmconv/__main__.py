"""Entry point of `python -m tvmconv`."""

from tvmconv.cli import command_line

command_line()
