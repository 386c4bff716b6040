"""What README and docs print runs as printed: each command in a process, and what it prints is what they say.

`pytest -m gpu tests/docs` runs all that needs a GPU, on a machine that has one. Without a GPU the same commands run for
smaller problems through OpenCL, each once though several blocks have it, and those that cannot are parsed.
"""

import importlib.util
import re
import shlex
import shutil
import subprocess
from dataclasses import replace

import doc_inputs
import pytest
from doc_blocks import (
    EXECUTABLE,
    MARKS,
    PAGES,
    ROOT,
    blocks,
    check_printed,
    execute,
    make_commands,
    smaller_word,
    without_gpu,
)

import tvmconv as tc
from tvmconv import registry
from tvmconv.cli import parse_words

GPU_SECONDS = 200.0  # for a block on a GPU host; most take less than a minute
CPU_SECONDS = 300.0  # for a block on a machine that runs other tests beside it
PACKAGES = ("tvmconv", "schedules")
# Pages for readers who know README, guide and tutorials. Other tests run most of their commands in other words.
SLOW_PAGES = {
    "docs/backward.md",
    "docs/gradient-measurements.md",
    "docs/eight-bits.md",
    "docs/extending.md",
    "docs/gallery.md",
    "docs/readers-guide.md",
    "docs/video.md",
    "docs/explain.md",
    "docs/hopper.md",
    "docs/kernels.md",
    "docs/report.md",
    "docs/counters.md",
    "docs/relax.md",
    "docs/results.md",
    "docs/results-filters.md",
    "docs/results-layers.md",
    "docs/tvm.md",
    "docs/winograd.md",
}
TAUGHT_PAGES = ("README.md", "docs/guide.md", "docs/tutorials/")
ALL = [block for page in PAGES for section in blocks(page).values() for block in section]
SECTIONS = {f"{page.relative_to(ROOT)}: {title}": section for page in PAGES for title, section in blocks(page).items()}


def smaller_command(command, mark):
    """A command of the same options with a smaller problem, unless it reads records of the problem that it names.

    None if it cannot run without a GPU.
    """
    if mark == "gpu":
        return without_gpu(command)
    if command.startswith("tvmconv report --suite"):
        return f"{command} --only conv1"
    explains = re.match(r"(\w+=\w+ )?tvmconv (explain|report) conv", command)
    if "--device opencl:0" not in command and (not explains or re.search("tuned|--log", command)):
        return command
    if not command.startswith("tvmconv"):
        return shlex.join(map(smaller_word, shlex.split(command)))
    return without_gpu(command) or command


def as_it_runs(command, mark):
    """What is the same of two commands that do the same here: all but comments and the name of a log that is read."""
    words = shlex.split(smaller_command(command, mark) or command, comments=True)
    text = shlex.join(words)
    return text if words[1:2] == ["tune"] else re.sub(r"\b\w+\.jsonl\b", "LOG", text)


FIRST: dict[str, int] = {}  # of each shell command, the place of the first block that runs it
for place, block in sorted(enumerate(ALL), key=lambda item: item[1].page in SLOW_PAGES):
    if block.mark in ("run", "gpu") and block.language == "sh":
        for command in block.commands:
            FIRST.setdefault(as_it_runs(command, block.mark), place)


def marked(*marks, is_slow=lambda page: page in SLOW_PAGES):
    """The sections that have a block of one of these marks; those of slow pages run with `-m slow`."""
    return [
        pytest.param(section, id=title, marks=[pytest.mark.slow] if is_slow(section[0].page) else [])
        for title, section in SECTIONS.items()
        if any(block.mark in marks for block in section)
    ]


def test_every_code_block_has_a_mark():
    without = [block for block in ALL if block.language in EXECUTABLE and block.mark not in MARKS]
    assert [f"{block.page}:{block.line}" for block in without] == []


@pytest.mark.parametrize("section", marked("run"))
def test_section_runs_as_printed(section, tmp_path, server):
    imports_torch = any(
        block.mark == "run" and re.search(r"^import .*\btorch\b", block.text, re.MULTILINE) for block in section
    )
    if imports_torch and not importlib.util.find_spec("torch"):
        pytest.skip("PyTorch, which the set-up does not install, is not there")
    for block in prepared(section, tmp_path, server):
        if block.mark == "run":
            small = smaller(block)
            check_printed(small, execute(small, tmp_path, CPU_SECONDS), numbers=True)


@pytest.mark.gpu
@pytest.mark.parametrize("section", marked("gpu", is_slow=lambda page: False))
def test_section_runs_as_printed_on_a_gpu(section, tmp_path):
    for block in prepared(section, tmp_path):
        if block.mark == "gpu" or (block.mark == "run" and "opencl" not in block.text):
            check_printed(block, execute(block, tmp_path, GPU_SECONDS, as_user=True), numbers=False)


@pytest.mark.parametrize("section", marked("gpu", is_slow=lambda page: not page.startswith(TAUGHT_PAGES)))
def test_section_for_a_gpu_runs_smaller_without_one(section, tmp_path, server, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # also where there is a GPU
    for block in prepared(section, tmp_path, server):
        if block.mark == "gpu" and block.language != "python":
            commands = [small for command in first_here(block) if (small := without_gpu(command))]
            if commands:
                execute(replace(block, language="sh", text="\n".join(commands)), tmp_path, CPU_SECONDS)


@pytest.mark.parametrize(
    "command",
    sorted(
        {
            command
            for block in ALL
            if block.mark in ("gpu", "sketch") and block.language in ("sh", "console")
            for command in block.commands
        }
    ),
)
def test_command_parses(command, python):
    words = shlex.split(command, comments=True)
    if "--cost-model" in words:  # whose file is not there yet
        place = words.index("--cost-model")
        del words[place : place + 2]
    if words[0] == "tvmconv":
        arguments = parse_words(words[1:])
        if words[1] == "run" and arguments.suite is None:
            workload, *names = arguments.words
            for name in names:
                registry.find_schedule(tc.parse(workload), name)
    elif words[:1] == ["python"] and words[1].startswith(("scripts/", "docs/")):
        called = [*python, *words[1 : 2 + (words[2].isidentifier())], "--help"]
        page = subprocess.run(called, cwd=ROOT, capture_output=True, text=True, check=True)
        for option in filter(re.compile("--?[a-z]").match, words[2:]):
            assert re.search(rf"(^|[\s,\[|]){option}\b", page.stdout), f"{words[1]} has no {option}"


def first_here(block):
    """The commands of a block that no block before it runs."""
    if block.language != "sh":
        return block.commands
    return [command for command in block.commands if ALL[FIRST[as_it_runs(command, block.mark)]] == block]


def smaller(block):
    """The block with smaller problems in those of its shell commands that run by OpenCL or explain a kernel."""
    if block.language != "sh" or block.output:
        return block
    return replace(block, text="\n".join(smaller_command(command, "run") for command in first_here(block)))


def prepared(section, folder, server=None):
    """The section's blocks, when the files and folders that they speak of are there.

    A new Python runs README's commands for a GPU and those of PyTorch, and a process of the server runs the others.
    """
    files = [block for block in section if block.mark == "file"]
    adds_module = any(doc_inputs.path_of(block.text).parts[0] in PACKAGES for block in files)
    if adds_module or any(block.text.startswith("sed -i") for block in section):  # never in the project itself
        for package in PACKAGES:
            shutil.copytree(ROOT / package, folder / package)
    for name in ("scripts", "tuning_logs", "docs/kernels_steps.py"):
        if any(name in block.text for block in section):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(ROOT / name)
    is_readme_gpu_section = section[0].page == "README.md" and any(block.mark == "gpu" for block in section)
    takes_new_python = is_readme_gpu_section or any("torch" in block.text for block in section)
    make_commands(folder, None if takes_new_python else server)
    for block in section:
        doc_inputs.make(block, folder)
        if block.mark == "file":
            doc_inputs.write(folder, block.text)
        else:
            yield block
