"""Hostile environments for a command: too little space, no compiler, few descriptors, folders that are missing.

Each is a text for the shell that comes before the command. `$D` is a folder of the test's own with `log`, `tmp` (which
is `$TMPDIR`), `home` (which is `$HOME`) and `cache` in it. The command has a namespace of its own for what is mounted.
"""

import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("log", "tmp", "home", "cache")
LIMIT_SECONDS = 240


def _mounted(folder, size="64k", filled="", read_only=False):
    """Shell text that mounts a small file system on a folder, and fills it or makes it read-only."""
    lines = [f'mount -t tmpfs -o size={size} none "$D/{folder}"']
    if filled:
        lines.append(f'head -c {filled} /dev/zero > "$D/{folder}/filled" 2> /dev/null')
    if read_only:
        lines.append(f'mount -o remount,ro "$D/{folder}"')
    return "; ".join(lines)


# What a search does there: "works" as everywhere; "refuses" with one line and exit status 2; "either", as the limit is
# near what the libraries need; "any", as the kernel may end the command itself.
ENVIRONMENTS = {
    "largest file 8 KiB": ("ulimit -f 8", "refuses"),
    "largest file 32 KiB": ("ulimit -f 32", "either"),
    "no file at all": ("ulimit -f 0", "refuses"),
    "16 descriptors": ("ulimit -n 16", "either"),
    "24 descriptors": ("ulimit -n 24", "either"),
    "40 descriptors": ("ulimit -n 40", "either"),
    "64 descriptors": ("ulimit -n 64", "works"),
    "1.5 GB of addresses": ("ulimit -v 1500000", "either"),
    "3 GB of addresses": ("ulimit -v 3000000", "either"),
    "2 s of a processor": ("ulimit -t 2", "any"),
    "temporary files missing": ("export TMPDIR=$D/none", "works"),
    "temporary files full": (_mounted("tmp", filled="1000000"), "works"),
    "temporary files nearly full": (_mounted("tmp", filled="40000"), "refuses"),
    "temporary files read-only": (_mounted("tmp", read_only=True), "works"),
    "home missing": ("export HOME=$D/none", "works"),
    "home unset": ("unset HOME", "works"),
    "home full": (_mounted("home", filled="1000000"), "works"),
    "home read-only": (_mounted("home", read_only=True), "works"),
    "home is a file": ("rmdir $D/home; echo > $D/home", "works"),
    "cache is a file": ("rmdir $D/cache; echo > $D/cache", "works"),
    "cache read-only": (_mounted("cache", read_only=True), "works"),
    "no programs": ("export PATH=", "refuses"),
    "log on a full disk": (_mounted("log", filled="1000000"), "refuses"),
    "log on a nearly full disk": (_mounted("log", size="4k"), "refuses"),
    "log read-only": (_mounted("log", read_only=True), "refuses"),
    "no output": ("exec > /dev/full", "refuses"),
    "output closed": ("exec >&-", "either"),
}


@functools.cache
def no_namespace():
    """Why file systems cannot be mounted for a command alone; None if they can."""
    tried = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False
    )
    return f"no file system can be mounted: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Ended:
    """How a command ended.

    Attributes:
        status: its exit status.
        out, err: what it printed.
        log: what it left of the log.
    """

    status: int
    out: str
    err: str
    log: Path


def run_in(folder, environment, words):
    """Run `tvmconv` in an environment; the log that it writes is copied to a place where it can be read.

    Args:
        folder: an empty one.
        environment: shell text.
        words: of the command line; `DEFAULT_LOG` stands for the log.
    """
    for name in FOLDERS:
        (folder / name).mkdir(exist_ok=True)
    kept = folder / "kept.jsonl"
    words = [str(folder / "log" / "log.jsonl") if word == "LOG" else word for word in words]
    script = (
        'D=$1; shift; exec 3> "$D/kept.jsonl"; (' + environment + '; exec "$@" 3>&-); status=$?; '
        'cat "$D/log/log.jsonl" >&3 2> /dev/null; exit $status'
    )
    if "mount" in environment:  # which both the command and the copying have to see
        script = script.replace("(" + environment + "; exec", environment + "; (exec")
    shell = ["/bin/sh", "-c", script, "sh", str(folder), sys.executable, "-m", "tvmconv", *words]
    surroundings = {
        **{name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "POCL_CACHE_DIR")},
        "PYTHONDONTWRITEBYTECODE": "1",  # a limit on files would cut bytecode off, which other tests then read
        "TMPDIR": str(folder / "tmp"),
        "HOME": str(folder / "home"),
        "TVMCONV_CACHE": str(folder / "cache"),
    }
    ended = subprocess.run(
        ["unshare", "-rm", *shell] if "mount" in environment else shell,
        env=surroundings, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    return Ended(ended.returncode, ended.stdout, ended.stderr, kept)
