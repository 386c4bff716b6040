"""Print how to complete words of commands by the Tab key.

Print the lines that switch on the completion of commands, options and their values in a shell. It needs the extra
`completion`, the package argcomplete.
"""

from __future__ import annotations

import argparse
from importlib import util

from tvmconv.cli.errors import UsageError
from tvmconv.optional_packages import format_install_command

SHELL_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/completions/tvmconv.fish"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = "Shell to complete words in (default: %(default)s)."
    parser.add_argument("--shell", choices=SHELL_FILES, default="bash", help=text)


def run(args: argparse.Namespace) -> int:
    """Print the code of the shell that completes words."""
    if not util.find_spec("argcomplete"):
        raise UsageError(f"completion needs argcomplete: {format_install_command('argcomplete')}")
    import argcomplete

    print(f'# for example in {SHELL_FILES[args.shell]}: eval "$(tvmconv completion --shell {args.shell})"')
    print(argcomplete.shellcode(["tvmconv"], shell=args.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Print the completions of the words that the shell asks about, and end the process; return without argcomplete."""
    if util.find_spec("argcomplete"):
        import argcomplete

        argcomplete.autocomplete(parser)
