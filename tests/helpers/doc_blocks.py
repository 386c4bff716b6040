"""The fenced code blocks of README and docs: what they are marked with, and how a user's shell would run them.

The word behind a fence's language is the block's mark:

* `run`: the block runs everywhere, as printed; where there is no GPU, OpenCL computes smaller problems.
* `gpu`: the block runs as printed where there is an NVIDIA GPU; elsewhere smaller problems run by the same commands.
* `file`: the block is written to the path in its first line, which is a comment or, in tutorials, `%%writefile PATH`.
* `output`: the block is a part of what the block before it prints; an ellipsis stands for any lines.
* `record`: the block is a line of a log.
* `excerpt`: the block is a part of a file beside the page, which the page links to.
* `sketch`: the block has placeholders, such as `HOST`; its commands are parsed.
* `setup`: the block installs something.

Consecutive `run` blocks of a tutorial in Python are one block, as the cells of a notebook share a process.

A comment `<!-- prints: A | B -->` behind a block names texts that the block's commands print.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVED = Path(__file__).with_name("forked_python.py")
PAGES = [ROOT / "README.md", *sorted((ROOT / "tuning_logs").rglob("README.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^```(?P<language>\w+)(?: (?P<mark>\w+))?\n(?P<text>.*?)^```$(?:\n<!-- prints: (?P<prints>.*?) -->$)?",
    re.MULTILINE | re.DOTALL,
)
EXECUTABLE = ("sh", "console", "python")
MARKS = ("run", "gpu", "file", "record", "excerpt", "sketch", "setup")
FAULT = re.compile(r"^Traceback \(most recent|^\w+Error: ", re.MULTILINE)  # no sound command prints that


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page.

    Attributes:
        page: the page's path below the project.
        line: the number of the block's first line.
        language: the word behind the fence.
        mark: the word behind the language; empty if there is none.
        text: what stands between the fences.
        prints: texts that the block's commands have to print.
        output: lines that the block has to print, of the `output` block behind it.
    """

    page: str
    line: int
    language: str
    mark: str
    text: str
    prints: tuple[str, ...]
    output: tuple[str, ...] = ()

    @property
    def commands(self) -> list[str]:
        """The lines that a shell reads, each whole."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip()]

    @property
    def expected(self) -> list[str]:
        """The lines that a console block shows behind its command, or the `output` block behind this one."""
        if self.language != "console":
            return [*self.output]
        return [line for line in self.text.splitlines() if not line.startswith("$ ")] if self.commands else []


def blocks(page: Path) -> dict[str, list[Block]]:
    """The blocks of each section of a page, by the section's title; a tutorial is read from its top, as one section."""
    text = page.read_text(encoding="utf-8")
    titles = [(match.start(), match[1]) for match in re.finditer(r"^## (.*)$", FENCE.sub(_blank, text), re.MULTILINE)]
    found: dict[str, list[Block]] = {}
    for match in FENCE.finditer(text):
        section = [] if page.parent.name == "tutorials" else reversed(titles)
        title = next((title for start, title in section if start < match.start()), page.name)
        prints = tuple(part.strip() for part in (match["prints"] or "").split("|") if part.strip())
        line = text.count("\n", 0, match.start()) + 1
        block = Block(str(page.relative_to(ROOT)), line, match["language"], match["mark"] or "", match["text"], prints)
        earlier = found.setdefault(title, [])
        if block.mark == "output":
            earlier[-1] = replace(earlier[-1], output=tuple(block.text.splitlines()))
        elif earlier and _is_cell_of(block, earlier[-1]):
            earlier[-1] = replace(
                earlier[-1], text=f"{earlier[-1].text}\n{block.text}", prints=earlier[-1].prints + prints
            )
        else:
            earlier.append(block)
    return found


def _is_cell_of(block: Block, earlier: Block) -> bool:
    """Whether a block of a tutorial goes on in the process of the one before it."""
    return (
        (block.language, block.mark) == (earlier.language, earlier.mark) == ("python", "run")
        and block.page.startswith("docs/tutorials/")
        and not earlier.output
    )


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])  # as long as it was, so that places in the text stay


def make_commands(folder: Path, server: str | None = None) -> None:
    """Make the commands `tvmconv` and `python` of a folder's shell, and a home without any cache.

    Args:
        folder: where the shell runs.
        server: the socket of a `forked_python` whose processes run them; a new Python runs them by default.
    """
    (folder / ".bin").mkdir()
    (folder / ".home").mkdir()
    python = [sys.executable, *(["-S", str(SERVED), "call", server] if server else [])]
    for name, words in (("tvmconv", [*python, "-m", "tvmconv"]), ("python", python)):
        command = folder / ".bin" / name
        command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        command.chmod(0o755)


def environment(folder: Path, *, as_user: bool) -> dict[str, str]:
    """What a new user's shell has: `tvmconv` on the PATH, and a home without any cache.

    Args:
        folder: where the shell runs, with its commands.
        as_user: without the variables by which tests have kernels compile faster.
    """
    modules = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    path = f"{folder / '.bin'}{os.pathsep}{os.environ['PATH']}"
    for_tests = {"POCL_EXTRA_BUILD_FLAGS", "TVMCONV_OPENCL_HEADER", "TVMCONV_CACHE", "OMP_NUM_THREADS"}
    kept = {name: value for name, value in os.environ.items() if not (as_user and name in for_tests)}
    return {**kept, "PYTHONPATH": modules, "PATH": path, "HOME": str(folder / ".home")}


def execute(block: Block, folder: Path, seconds: float, *, as_user: bool = False) -> str:
    """Run a block in a process of its own, as a shell would; what it prints, standard error included.

    Raises:
        AssertionError: its exit status is not 0, it takes longer than `seconds`, or it prints an error.
    """
    text = "\n".join(block.commands) if block.language == "console" else block.text
    script = folder / (".block.py" if block.language == "python" else ".block.sh")
    script.write_text(text, encoding="utf-8")
    command = [folder / ".bin/python"] if block.language == "python" else ["bash", "-euo", "pipefail"]
    with subprocess.Popen(
        [*command, script.name],
        cwd=folder,
        env=environment(folder, as_user=as_user),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            raise AssertionError(f"this takes more than {seconds:.0f} s:\n{text}\n{printed[-4000:]}") from None
    assert process.returncode == 0, f"exit status {process.returncode}:\n{text}\n{printed[-4000:]}"
    assert not FAULT.search(printed), f"an error is printed:\n{text}\n{printed[-4000:]}"
    return printed


def check_printed(block: Block, printed: str, *, numbers: bool) -> None:
    """Hold what a block printed against what the page says that it prints.

    Args:
        block: the block.
        printed: what its commands printed.
        numbers: whether numbers and the device have to be the same as well.

    Raises:
        AssertionError: a text, or a line of a console block, was not printed.
    """
    for text in block.prints:
        assert text in printed, f"{block.page}:{block.line}: {text!r} is not printed:\n{printed[-4000:]}"
    same = (lambda line: " ".join(line.split())) if numbers else _shape
    there = iter([same(line) for line in printed.splitlines()])
    for line in block.expected:  # in this order; an ellipsis stands for any lines
        wanted = same(line)
        if wanted and wanted != "…":
            assert wanted in there, f"{block.page}:{block.line}: {line!r} is not printed there:\n{printed[-4000:]}"


def _shape(line: str) -> str:
    """A line without its numbers, without the device's name and without cuDNN's choice, which differs between runs."""
    line = re.sub(r" on (cuda|opencl):\d+, .*", " on a device", line)
    line = line.replace(", algorithm by heuristics", ", best algorithm")
    line = re.sub(r"\baddresses [0-9a-f]+ to [0-9a-f]+", "addresses", line)
    line = re.sub(r"\d[\d,.]*(e[-+]?\d+)?", "0", line)
    return " ".join(line.split())


def without_gpu(command: str) -> str | None:
    """A command of a `gpu` block as it can run without a GPU, of a smaller problem and for a shorter time.

    None if it needs a GPU whatever the problem is.
    """
    words = shlex.split(command, comments=True)
    if not words or words[0] != "tvmconv" or words[1] in ("counters", "optimize", "suites", "train"):
        return None
    if "--suite" in words or any(",f16" in word for word in words):
        return None  # PoCL computes no float16, and a network takes long
    if words[1] == "run":
        _name_a_schedule(words)
    small, skip = [], False
    for word in words:
        if skip or word == "--baseline":  # the option and its value
            skip = not skip and word == "--baseline"
            continue
        small.append(smaller_word(word, 64 if "--set" in words else 16))
    if "--cost-model" in words:
        return None  # to train a model takes minutes
    if words[1] == "tune" and "--seconds" in small:  # a busy machine gets nothing done in a second
        place = small.index("--seconds")
        small[place : place + 2] = ["--trials", "2"]
    if "--device" in small:
        small[small.index("--device") + 1] = "opencl:0"
    if words[1] == "run" and "--seconds" not in small:
        small += ["--seconds", "0.01"]
    return shlex.join(small)


def _name_a_schedule(words: list[str]) -> None:
    """Leave one schedule of those that `tvmconv run` names; of a convolution, `tiling` where it names none."""
    names = [word for word in itertools.takewhile(lambda word: not word.startswith("-"), words[3:])]
    words[3 : 3 + len(names)] = names[-1:] or (["tiling"] if words[2].startswith("conv2d:") else [])


def smaller_word(word: str, max_channels: int = 16) -> str:
    """A workload's text with at most 16 output channels, 8 pixels an axis, 4,096 samples of a filter.

    Args:
        word: of a command; one that is no workload stays.
        max_channels: input channels, at most, which knobs may need.
    """
    if match := re.fullmatch(r"(filter[12]d:)([\dx]+)(,.*)", word):
        return (
            match[1]
            + "x".join(str(min(int(size), 4096 if match[1] == "filter1d:" else 64)) for size in match[2].split("x"))
            + match[3]
        )
    if not (match := re.fullmatch(r"(conv\dd:)([\dx]+),([\dx]+)(.*)", word)):
        return word
    n, c, *space = map(int, match[2].split("x"))
    o, per_group, *taps = map(int, match[3].split("x"))
    if c != per_group:
        return word
    sizes = "x".join(map(str, (n, min(c, max_channels), *(min(size, 8) for size in space))))
    return f"{match[1]}{sizes},{'x'.join(map(str, (min(o, 16), min(c, max_channels), *taps)))}{match[4]}"
