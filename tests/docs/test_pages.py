"""The pages: what they link to is there, and what scripts write into them is as the scripts write it."""

import json
import re
import runpy

import pytest
from doc_blocks import FENCE, PAGES, ROOT

from tvmconv.logs.record import Record

COMPARED = {  # in pages' tables of networks
    "results.md": "*/*-tuned.json",
    "knowledge.md": "**/*-tuned.json",
    "tensor-cores.md": "*/*-nhwc*-tuned.json",
}


def test_what_pages_call_predicted_is_of_layers_that_the_model_had_not_seen():
    told = []
    for file in (ROOT / "tuning_logs").glob("**/*-tuned.json"):
        told += re.findall(r"a model that has seen (\w+)", json.loads(file.read_text(encoding="utf-8"))["provenance"])
    assert len(told) >= 5
    assert set(told) == {"none"}


TIMED = {"seconds"}  # sections of what a script timed, and has no file of


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
    (shown,) = (json.loads(match["text"]) for match in FENCE.finditer(page) if match["mark"] == "record")
    log = (ROOT / "tuning_logs/nvidia-h200/d2l.jsonl").read_text(encoding="utf-8")
    assert shown in map(json.loads, log.splitlines())
    failed = Record.parse(json.dumps(shown | {"result": [[1e9], 4, 0.1, 0.0], "message": "no"}))
    explained = set(re.findall(r"^\| `(\w+)", page, re.MULTILINE))
    assert {*shown, *json.loads(failed.line())} <= explained
    assert Record.parse(json.dumps(shown)).line() == json.dumps(shown)
