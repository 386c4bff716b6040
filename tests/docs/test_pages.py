"""The pages: what they print runs, and what they link to is there.

In a page's source, the word behind a fence's language says what becomes of the block: `file` writes it to the path in
its first line, `run` runs it. The blocks of a section (`## …`) share a folder, with a copy of this project's packages
if they add to these.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tvmconv.logs.record import Record

ROOT = Path(__file__).parents[2]
COMPARED = {  # in pages' tables of networks
    "results.md": "*/*-tuned.json",
    "knowledge.md": "**/*-tuned.json",
    "tensor-cores.md": "*/*-nhwc*-tuned.json",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "tuning_logs").rglob("README.md")), *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = ("tvmconv", "schedules")
FENCE = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 300


class Block(NamedTuple):
    language: str
    mark: str
    text: str


def sections(page):
    """The marked blocks of each section that has any, by its title."""
    found = {}
    title = page.name
    for part in re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        if part.startswith("## "):
            title = part.partition("\n")[0].removeprefix("## ")
        blocks = [Block(*match.groups()) for match in FENCE.finditer(part) if match[2] in ("file", "run")]
        if blocks:
            found[title] = blocks
    return found


SECTIONS = [
    pytest.param(blocks, id=f"{page.relative_to(ROOT)}: {title}")
    for page in PAGES
    for title, blocks in sections(page).items()
]


def test_what_pages_call_predicted_is_of_layers_that_the_model_had_not_seen():
    told = []
    for file in (ROOT / "tuning_logs").glob("**/*-tuned.json"):
        told += re.findall(r"a model that has seen (\w+)", json.loads(file.read_text(encoding="utf-8"))["provenance"])
    assert len(told) >= 5
    assert set(told) == {"none"}


@pytest.mark.parametrize("blocks", SECTIONS)
def test_what_a_section_prints_runs(blocks, tmp_path):
    if any(block.mark == "file" and path_of(block.text).parts[0] in PACKAGES for block in blocks):
        for package in PACKAGES:
            shutil.copytree(ROOT / package, tmp_path / package)
    command = tmp_path / "bin/tvmconv"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tvmconv "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    for number, block in enumerate(blocks):
        if block.mark == "file":
            write(tmp_path, block.text)
        else:
            run(tmp_path, block, number)


def path_of(text):
    """The path in the first line of a file."""
    return Path(text.partition("\n")[0].removeprefix("# "))


def write(folder, text):
    path = folder / path_of(text)
    assert not path.exists(), f"{path.name} is no new file"
    path.write_text(text, encoding="utf-8")
    if path.name == "pyproject.toml":
        install(folder, text)


def install(folder, project):
    """What pip would tell Python of a project's entry points."""
    name = re.search(r'^name = "(.*)"$', project, re.MULTILINE)[1]
    group, entries = re.search(r'^\[project\.entry-points\."(.*)"\]\n((?:.+\n)+)', project, re.MULTILINE).groups()
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(f"[{group}]\n" + entries.replace('"', ""), encoding="utf-8")


TIMED = {"seconds"}  # sections of what a script timed, and has no file of


def run(folder, block, number):
    script = folder / f"block{number}"
    script.write_text(block.text, encoding="utf-8")
    command = {"python": [sys.executable], "sh": ["bash", "-eu"]}[block.language]
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    modules = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": modules, "PATH": path}
    ran = subprocess.run(
        [*command, script.name], cwd=folder, env=environment, timeout=SECONDS, capture_output=True, text=True
    )
    assert ran.returncode == 0, f"{block.text}\n{ran.stdout}\n{ran.stderr}"


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page):
    """The links and images of a page that lead to a place in this project."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not re.match(r"\w+://", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no such file"
        assert target.is_relative_to(ROOT), f"{link} leads out of the project"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_sections_are_as_the_scripts_write_them(page, tmp_path, capsys):
    text = page.read_text(encoding="utf-8")
    again = tmp_path / "page.md"
    again.write_text(text, encoding="utf-8")
    names = re.findall(
        r"^<!-- ([\w-]+) -->\n(?!<!-- /\1 -->)", text, re.MULTILINE
    )  # one that is empty waits for its data
    assert names or page.name != "results.md"
    names = [name for name in names if name not in TIMED]
    for section, options in {"networks": [], "predicted": ["--predicted"], "slower": ["--slower"]}.items():
        if section in names:
            names.remove(section)
            compared = sorted(map(str, (ROOT / "tuning_logs").glob(COMPARED[page.name])))
            main = runpy.run_path(str(ROOT / "scripts/networks.py"))["main"]
            assert main([*compared, *options, "--into", str(again)]) == 0
    if "reach" in names:
        names.remove("reach")
        searches = sorted(map(str, (ROOT / "tuning_logs/searches").glob("*.gz")))
        beside = sorted(map(str, (ROOT / "tuning_logs").glob("**/*-tuned.json")))
        main = runpy.run_path(str(ROOT / "scripts/reach.py"))["main"]
        assert main([*searches, "--beside", *beside, "--into", str(again)]) == 0
    for section, folder in {"winners": "winograd", "winners-hopper": "winograd/hopper"}.items():
        if section in names:
            names.remove(section)
            compared = sorted(map(str, (ROOT / "tuning_logs").glob(f"*/{folder}/*-tuned.json")))
            main = runpy.run_path(str(ROOT / "scripts/winners.py"))["main"]
            assert main([*compared, "--section", section, "--into", str(again)]) == 0
    if "torch-models" in names:
        names.remove("torch-models")
        runs = sorted(map(str, (ROOT / "tuning_logs").glob("*/torch/torch-*.json")))
        main = runpy.run_path(str(ROOT / "scripts/torch_table.py"))["main"]
        assert main([*runs, "--into", str(again)]) == 0
    if "agreement" in names:
        names.remove("agreement")
        (beside,) = map(str, (ROOT / "tuning_logs").glob("*/kernels-beside.json.gz"))
        main = runpy.run_path(str(ROOT / "scripts/agreement.py"))["main"]
        assert main([beside, "--into", str(again)]) == 0
    for name in names:
        (measured,) = (ROOT / "tuning_logs").glob(f"*/{name}.json")
        if name.startswith("bounds-"):
            script, words = "bound_agreement", ["-o", str(tmp_path), "--again"]
        else:
            script, words = "counters" if name.endswith("-counters") else "sweep", ["--from"]
        main = runpy.run_path(str(ROOT / f"scripts/{script}.py"))["main"]
        assert main([*words, str(measured), "--into", str(again)]) == 0
    assert again.read_text(encoding="utf-8") == text


def test_the_line_that_the_log_format_shows_is_a_record_whose_keys_it_explains():
    page = (ROOT / "docs/log-format.md").read_text(encoding="utf-8")
    (shown,) = (json.loads(match[3]) for match in FENCE.finditer(page) if match[2] == "record")
    log = (ROOT / "tuning_logs/nvidia-h200/d2l.jsonl").read_text(encoding="utf-8")
    assert shown in map(json.loads, log.splitlines())
    failed = Record.parse(json.dumps(shown | {"result": [[1e9], 4, 0.1, 0.0], "message": "no"}))
    explained = set(re.findall(r"^\| `(\w+)", page, re.MULTILINE))
    assert {*shown, *json.loads(failed.line())} <= explained
    assert Record.parse(json.dumps(shown)).line() == json.dumps(shown)
