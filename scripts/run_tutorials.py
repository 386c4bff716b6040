"""Run the blocks of tutorials on a machine with a GPU, and store in the pages what those that need the GPU print.

    python scripts/run_tutorials.py docs/tutorials/*.md

A tutorial is a notebook as text: jupytext opens it, and the word behind a block's language is its mark. Blocks marked
`run`, `gpu` and `file` run from top to bottom in a temporary folder. What a block prints goes between the lines
`<!-- output -->` and `<!-- /output -->` behind it, if they are there, with the device, versions and date. A picture
that the block writes is copied to `outputs/` beside the page, and shown as well. Tests check the other blocks. Blocks
for OpenCL run on the GPU instead, as a machine with a GPU may lack OpenCL.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tvmconv import devices
from tvmconv.cli.errors import run_guarded
from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error
from tvmconv.experiments.provenance import describe_provenance

BLOCK = re.compile(
    r"^```(?P<language>python|sh) (?P<mark>run|gpu|file)\n(?P<text>.*?)^```$"
    r"(?:(?:\n<!-- prints: [^\n]* -->)?\n\n<!-- output -->\n(?P<stored>.*?<!-- /output -->))?",
    re.MULTILINE | re.DOTALL,
)
PICTURES = {".png", ".svg"}
MAX_LINES = 40  # of a stored output
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def run_block(language: str, text: str, folder: Path) -> str:
    """Run a block in a process of its own, and return what it prints; raise Error if it fails."""
    script = folder / (".block.py" if language == "python" else ".block.sh")
    script.write_text(text, encoding="utf-8")
    command = [sys.executable, script.name] if language == "python" else ["bash", "-euo", "pipefail", script.name]
    root = Path(__file__).parents[1]
    modules = os.pathsep.join(filter(None, [str(folder), str(root), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PATH": PATH, "PYTHONPATH": modules, "MPLBACKEND": "agg"}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        raise Error(f"exit status {process.returncode} of\n{text}\n{process.stderr[-2000:]}")
    return process.stdout


def shorten(text: str) -> str:
    """Return the first lines of a text."""
    lines = text.rstrip().splitlines()
    return "\n".join(lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], "…"])


def list_pictures(folder: Path) -> dict[Path, int]:
    """Return the pictures in a folder with the times of their last change."""
    return {file: file.stat().st_mtime_ns for file in folder.iterdir() if file.suffix in PICTURES}


class PageRun:
    """The blocks of a page that run one after another in a folder."""

    def __init__(self, page: Path, folder: Path, provenance: str) -> None:
        self._page, self._folder, self._provenance = page, folder, provenance
        # Blocks in Python marked `run`, which share a process with those before and after them.
        self._cells: list[str] = []

    def run_block(self, match: re.Match[str]) -> str:
        """Run a block, and return its text with its output if the page stores it."""
        language, mark, code = match["language"], match["mark"], match["text"].replace("opencl:0", "cuda:0")
        if mark == "file":
            first_line, _, contents = code.partition("\n")
            (self._folder / first_line.removeprefix("%%writefile ")).write_text(contents, encoding="utf-8")
            return match[0]
        if (language, mark) == ("python", "run"):
            self._cells.append(code)
            return match[0]
        if self._cells:  # later blocks may read the files that they write
            run_block("python", "\n".join(self._cells), self._folder)
            self._cells.clear()
        before = list_pictures(self._folder)
        printed = run_block(language, code, self._folder)
        if match["stored"] is None:
            return match[0]
        parts = [f"*{self._provenance}:*", f"```text\n{shorten(printed)}\n```", *self._store_pictures(before)]
        start = match[0][: match.start("stored") - match.start()]
        return start + "\n\n".join(parts) + "\n\n<!-- /output -->"

    def _store_pictures(self, before: dict[Path, int]) -> list[str]:
        """Copy the pictures that a block wrote to `outputs`, and return the lines that show them."""
        outputs = self._page.parent / "outputs"
        lines = []
        for picture, time in list_pictures(self._folder).items():
            if before.get(picture) != time:
                outputs.mkdir(exist_ok=True)
                copy = outputs / f"{self._page.stem}-{picture.name}"
                copy.write_bytes(picture.read_bytes())
                lines.append(f"![{picture.name}, as the block above draws it](outputs/{copy.name})")
        return lines


def run_page(page: Path, provenance: str) -> None:
    """Run the blocks of a page, and write their outputs into it, also those before a block that fails."""
    text = page.read_text(encoding="utf-8")
    parts: list[str] = []
    end = 0
    with tempfile.TemporaryDirectory() as name, progress_line(f"{page.name}: ") as show:
        page_run = PageRun(page, Path(name), provenance)
        try:
            for match in BLOCK.finditer(text):
                show(match["text"].strip().partition("\n")[0])
                parts += [text[end : match.start()], page_run.run_block(match)]
                end = match.end()
        finally:
            page.write_text("".join(parts) + text[end:], encoding="utf-8")


def main() -> int:
    """Parse the command line, run the pages and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE", help="Tutorial, a Markdown file.")
    args = parser.parse_args()
    provenance = describe_provenance(devices.find_device("cuda"), "").partition("; `")[0]
    for page in args.pages:
        run_page(page, provenance)
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded("run_tutorials", main))
