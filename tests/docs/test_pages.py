"""The pages: what they link to is there, and generated sections are as their commands write them."""

import importlib
import itertools
import json
import re
import subprocess
import sys

import pytest
from cubins import needs_nvrtc
from doc_blocks import FENCE, PAGES, ROOT

import tvmconv as tc
from tvmconv import cli, registry
from tvmconv.logs.record import Record

LOGS = ROOT / "tuning_logs"
COMPARED = {  # in pages' tables of networks
    "results.md": "*/*/*-tuned.json",
    "predictions.md": "**/*-tuned.json",
}


def test_predictions_are_of_layers_that_the_model_had_not_seen():
    told = []
    for file in (ROOT / "tuning_logs").glob("**/*-tuned.json"):
        told += re.findall(r"a model that has seen (\w+)", json.loads(file.read_text(encoding="utf-8"))["provenance"])
    assert len(told) >= 5
    assert set(told) == {"none"}


TIMED = {"seconds", "kernel-steps", "output"}  # sections of what a script ran, and has no file of


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
def test_excerpts_are_as_in_their_file(page):
    excerpts = [
        match["text"] for match in FENCE.finditer(page.read_text(encoding="utf-8")) if match["mark"] == "excerpt"
    ]
    files = [page.parent / link for link in links(page) if link.endswith(".py") and "/" not in link]
    sources = [file.read_text(encoding="utf-8") for file in files]
    for excerpt in excerpts:
        assert any(excerpt in source for source in sources), excerpt


def test_pictures_of_the_pipeline_are_as_their_script_draws_them(tmp_path, python):
    subprocess.run([*python, ROOT / "docs/kernels_pictures.py", tmp_path], check=True)
    for picture in ("kernels-timeline.svg", "kernels-swizzle.svg"):
        assert (tmp_path / picture).read_text(encoding="utf-8") == (ROOT / "docs" / picture).read_text(encoding="utf-8")


@needs_nvrtc
def test_steps_of_the_convolution_keep_accumulators_in_registers(python):
    command = [*python, "docs/kernels_steps.py", "--resources"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    header, *lines = (re.split(r"\s{2,}", line) for line in printed.splitlines())
    assert len(lines) == 14  # seven kernels of two layers
    assert {line[header.index("spilled bytes")] for line in lines} == {"0"}


def command_of(section, page, folder):
    """The command that writes a section of a page, but for the page's path."""

    def recorded(pattern):
        return sorted(LOGS.glob(pattern))

    kinds = {"networks": [], "predicted": ["--predicted"], "slower": ["--slower"]}
    winners = {"winners": "winograd/layers", "winners-hopper": "winograd/hopper"}
    if section in kinds:
        return ["bench", "networks", *recorded(COMPARED[page]), *kinds[section]]
    if section == "reach":
        return ["bench", "time-to-target", *recorded("searches/*.gz"), "--comparisons", *recorded("**/*-tuned.json")]
    if section in winners:
        return ["bench", "winners", *recorded(f"*/{winners[section]}/*-tuned.json"), "--section", section]
    if section == "torch-models":
        return ["bench", "torch-table", *recorded("*/torch/torch-*.json*")]
    if section == "torch-layouts":
        return ["bench", "torch-table", *recorded("*/torch-layouts/*.json"), "--by-layout"]
    if section == "layouts":
        (measured,) = recorded("*/layouts/layouts.json")
        return ["bench", "layouts", LOGS / "channels-first-layers.json", "--measured-only", "-o", measured.parent]
    if section == "torch-quantized":
        return ["bench", "torch-table", *recorded("*/eight-bits/torch-*.json.gz"), "--quantized"]
    if section == "torch-training":
        return ["bench", "torch-training-table", *recorded("*/torch-training/*.gz")]
    if section == "relax-models":
        return ["bench", "relax-table", *recorded("*/relax/relax-*.json")]
    if section == "relax-candidates":
        return ["bench", "relax-table", *recorded("*/relax/relax-*.json"), "--candidates"]
    if section == "agreement":
        return ["counters", "--from", *recorded("*/*/kernels-beside.json.gz")]
    if section == "eight-bits":
        return ["bench", "eight-bits", "--from", *recorded("*/eight-bits/eight-bits*.json.gz")]
    if section == "gradients":
        return ["bench", "layer-table", *recorded("*/gradients/*.json.gz"), "--summary", "--section", section]
    if section == "gradients-networks":
        networks = ROOT / "tuning_logs/gradient-networks.json"
        return [
            "bench",
            "layer-table",
            *recorded("*/gradients/*.json.gz"),
            "--networks",
            networks,
            "--section",
            section,
        ]
    if section == "gradients-slower":
        files = recorded("*/gradients/*.json.gz")
        return ["bench", "layer-table", *files, "--below", "1.0", "--short-legend", "--section", section]
    if section.startswith("gradients-") and not section.endswith("-counters"):
        files = reversed(recorded(f"*/gradients/{section}*.json.gz"))
        return ["bench", "layer-table", *files, "--short-legend", "--section", section]
    if section in ("video", "video-bare", "batches-depthwise"):
        return ["bench", "layer-table", *recorded(f"*/{section}/*-tuned*.json.gz"), "--section", section]
    if section == "batches-energy":
        files = recorded("*/batches/batch-energy-tuned*.json.gz")
        return ["bench", "layer-table", *files, "--short-legend", "--section", section]
    if section in ("batches-networks", "batches-slower"):
        whole = "resnet50-f16", "resnet50-no-conv1-tf32", "yolov8s-f16", "efficientnet_b0-f16", "sd_unet-f16"
        files = recorded("*/batches/*-tuned*.json.gz"), *(recorded(f"*/*/{name}-nhwc-b*-tuned.json") for name in whole)
        files = [*itertools.chain(*files), *recorded("*/sd_vae_decoder/sd_vae_decoder-f16-nhwc-tuned.json")]
        kind = ["--below", "1", "--short-legend"]
        if section == "batches-networks":
            kind = ["--networks", LOGS / "batch-networks.json", "--possible"]
        return ["bench", "layer-table", *files, *kind, "--section", section]
    (measured,) = recorded(f"*/*/{section}.json") or recorded(f"*/*/{section}.json.gz")
    if section.startswith("bounds-"):
        return ["bench", "bounds", "--from", measured, "-o", folder]
    return [*(["counters"] if section.endswith("-counters") else ["bench", "sweep"]), "--from", measured]


@pytest.mark.sample(7)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_sections_are_as_their_commands_write_them(page, tmp_path, capsys):
    text = page.read_text(encoding="utf-8")
    again = tmp_path / "page.md"
    again.write_text(text, encoding="utf-8")
    names = re.findall(
        r"^<!-- ([\w-]+) -->\n(?!<!-- /\1 -->)", text, re.MULTILINE
    )  # one that is empty waits for its data
    assert names or page.name != "results.md"
    names = [name for name in names if name not in TIMED]
    for name in names:
        assert cli.main([*map(str, command_of(name, page.name, tmp_path)), "--update-page", str(again)]) == 0
    assert again.read_text(encoding="utf-8") == text


def test_the_site_describes_the_knobs_of_each_schedule():
    pytest.importorskip("mkdocs")
    sys.path.append(str(ROOT / "scripts"))
    examples = importlib.import_module("site_hooks").EXAMPLES
    described = {schedule.name for text in examples for schedule in tc.schedules(tc.parse(text))}
    assert {schedule.name for schedule in registry.schedules()} <= described


def test_the_log_format_explains_each_key_of_its_example():
    page = (ROOT / "docs/log-format.md").read_text(encoding="utf-8")
    (shown,) = (json.loads(match["text"]) for match in FENCE.finditer(page) if match["mark"] == "record")
    log = (ROOT / "tuning_logs/nvidia-h200/d2l/d2l.jsonl").read_text(encoding="utf-8")
    assert Record.parse(json.dumps(shown)) in map(Record.parse, log.splitlines())
    failed = Record.parse(json.dumps(shown | {"result": [[1e9], 4, 0.1, 0.0], "message": "no"}))
    explained = set(re.findall(r"^\| `(\w+)", page, re.MULTILINE))
    assert {*shown, *json.loads(failed.line())} <= explained
    assert Record.parse(json.dumps(shown)).line() == json.dumps(shown)
