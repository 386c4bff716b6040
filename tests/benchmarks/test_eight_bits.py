"""`tvmconv bench eight-bits`: its workloads and its table; the measurement needs a GPU."""

import argparse
import json
from contextlib import ExitStack, nullcontext

import pytest

import tvmconv as tc
from tvmconv import cli
from tvmconv.benchmarks import eight_bits
from tvmconv.benchmarks.eight_bits import CUDNN, EightBitTimes, make_table, make_variant
from tvmconv.devices import Timing
from tvmconv.workloads.suites import read_suite

LAYER = "conv2d:1x16x8x8,16x16x3x3,s1,p1,f16,nhwc"


def test_variants_have_results_in_float16():
    w = tc.parse("conv2d:2x16x8x8,8x16x3x3,s1,p1,bias,relu")
    variants = [make_variant(w, text).text.partition("p1,")[2] for text in ("f16", "i8")]
    assert variants == ["f16,nhwc", "out-f16,i8,nhwc,scale"]


def test_table_compares_8_bits_with_libraries():
    times = EightBitTimes(LAYER, {"f16": 2e-6, "i8": 1e-6, CUDNN: 3e-6})
    table = make_table([times, EightBitTimes(LAYER, {"f16": 2e-6})], ["i8"])
    assert table.rows[0] == (f"`{LAYER}`", "2.00", "1.00", "3.00", "—", "3.00", "2.00", "—")
    assert table.rows[2][0] == "geometric mean"
    assert table.rows[2][-3:] == ("3.00", "2.00", "—")


def test_limit_is_that_of_bytes_or_of_the_fastest_products():
    large = LAYER.replace("8x8", "16x16")  # four times the operations
    seconds = [{"i8": 2e-6, CUDNN: 4e-6, "copy": copy} for copy in (1e-6, 1e-6)]
    times = [EightBitTimes(text, own) for text, own in zip((LAYER, large), seconds, strict=True)]
    table = make_table(times, ["i8"])
    assert (table.headers[-1], table.headers[5]) == ("limit × cuDNN f16", "limit [µs]")
    assert [row[5] for row in table.rows[:2]] == ["1.00", "2.00"]
    assert [row[-1] for row in table.rows] == ["4.00", "2.00", "2.83"]


def test_each_batch_size_has_a_mean():
    times = [EightBitTimes(LAYER, {"f16": 2e-6, "i8": 1e-6})]
    times.append(EightBitTimes(LAYER.replace(":1x", ":8x"), {"f16": 3e-6, "i8": 1e-6}))
    rows = make_table(times, ["i8"]).rows[2:]
    assert [(row[0], row[-2]) for row in rows] == [
        ("geometric mean, batch 1", "2.00"),
        ("geometric mean, batch 8", "3.00"),
    ]


def test_results_of_8_bits_have_a_mean_of_their_own():
    assert make_variant(tc.parse(LAYER), "i8", quantized=True).text.endswith(",i8,nhwc,scale,quantize")
    times = [EightBitTimes(LAYER, {"f16": 2e-6, "i8": 1e-6}, quantized=quantized) for quantized in (False, True)]
    rows = make_table(times, ["i8"]).rows
    assert [row[0] for row in rows[1:]] == [
        f"`{LAYER}`, 8-bit results",
        "geometric mean, batch 1",
        "geometric mean, batch 1, 8-bit results",
    ]


def test_of_equal_convolutions_in_files_the_last_one_counts(tmp_path, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, seconds in zip(files, (1e-6, 4e-6), strict=True):
        layers = [{"workload": LAYER, "seconds": {"f16": 8e-6, "i8": seconds}}]
        file.write_text(json.dumps({"provenance": file.name, "layers": layers}))
    assert cli.main(["bench", "eight-bits", "--from", *map(str, files), "--dtype", "i8"]) == 0
    words = capsys.readouterr().out.split()
    assert {"8.00", "4.00", "2.00", "a.json", "b.json"} <= {*words}
    assert "1.00" not in words


def test_suite_has_the_workloads_of_all_dtypes(tmp_path):
    file = tmp_path / "suite.json"
    command = ["bench", "eight-bits", LAYER, "--batch", "2", "--dtype", "i8", "--write-suite", str(file)]
    assert cli.main(command) == 0
    texts = [layer.workload.text for layer in read_suite(file)]
    assert [text.partition("p1,")[2] for text in texts] == ["f16,nhwc", "out-f16,i8,nhwc,scale"]
    assert all(text.startswith("conv2d:2x") for text in texts)


@pytest.mark.parametrize("content", [None, "[]", '{"layers": [{"a": 1}], "provenance": ""}', "text"])
def test_table_of_a_file_is_written_into_a_page(tmp_path, capsys, content):
    page, file = tmp_path / "page.md", tmp_path / "eight-bits.json"
    page.write_text("<!-- eight-bits -->\n<!-- /eight-bits -->\n")
    times = {"workload": "conv2d:1x16x8x8,16x16x3x3,s1,p1,f16,nhwc", "seconds": {"f16": 2e-6, "i8": 1e-6}}
    file.write_text(content or json.dumps({"provenance": "GPU; 2026", "layers": [times]}))
    command = ["bench", "eight-bits", "--from", str(file), "--dtype", "i8", "--update-page", str(page)]
    assert cli.main(command) == (2 if content else 0)
    if content:
        assert "expected a file eight-bits.json" in capsys.readouterr().err
    else:
        assert "p1,f16,nhwc` | 2.00 | 1.00 |" in page.read_text()
        assert "Median times. GPU; 2026" in page.read_text()


def test_listed_configs_are_compiled_in_the_order_of_the_layers(tmp_path, monkeypatch):
    first, second, other = (f"conv2d:1x64x{n}x{n},64x64x1x1,s1,p0,f16,nhwc" for n in (8, 9, 10))
    entries = [
        {"workload": text, "schedule": "hopper", "config": {"stages": stages}, "arch": "sm_90"}
        for text, stages in ((second, 2), (other, 2), (first, 2), (second, 3))
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(json.dumps(entry) for entry in entries))
    monkeypatch.setattr(eight_bits, "read_archives", lambda paths, device: {second: [(entries[0], None)]})
    monkeypatch.setattr(eight_bits, "AheadBuilder", lambda *arguments: arguments)
    args = argparse.Namespace(archive=["kernels.zip"], configs=[tmp_path / "list.jsonl"], workers=2)
    listed, archived, num_workers = eight_bits.make_builder(args, [tc.parse(first), tc.parse(second)], None)
    assert listed == [entries[2], entries[3]]
    assert (list(archived), num_workers) == ([second], 2)


class FakeTimer:
    """A timer of turns of a kernel that takes the same time in each."""

    def __init__(self, seconds, turns):
        self.seconds, self.turns = seconds, turns

    def take_turn(self, seconds, *, counts=True):
        self.turns.append(self.seconds)

    def finish(self):
        return Timing((self.seconds,), "turns", cold=False)


def test_kernels_and_libraries_are_timed_in_turns(monkeypatch):
    turns = []

    def make_clock(seconds):
        return eight_bits.TurnClock(lambda _: seconds, lambda: nullcontext(FakeTimer(seconds, turns)))

    monkeypatch.setattr(eight_bits, "pick_library_calls", lambda *arguments: {"nhwc": make_clock(4e-6)})
    monkeypatch.setattr(eight_bits, "pick_product", lambda *arguments: make_clock(3e-6))
    monkeypatch.setattr(eight_bits, "exceeds_cache", lambda *arguments: False)
    monkeypatch.setattr(eight_bits, "time_bytes", lambda *arguments, cold: 5e-7)
    candidates = {"f16": [(make_clock(2e-6), "a")], "i8": [(make_clock(1e-6), "b"), (make_clock(5e-6), "c")]}
    arguments = EightBitTimes(LAYER), candidates, ["i8"], None, ""
    with ExitStack() as stack:
        times = eight_bits.measure_layer(*arguments, stack, {"f16": (), "i8": ()})
    assert times.seconds == {"copy": 5e-7, CUDNN: 4e-6, "cuBLAS i8": 3e-6, "f16": 2e-6, "i8": 1e-6}
    assert times.kernels == {"f16": "a", "i8": "b"}
    assert turns[:4] == turns[4:8] == [2e-6, 1e-6, 4e-6, 3e-6]
    assert eight_bits.time_together([lambda seconds: 1e-6, make_clock(2e-6)]) == [1e-6, 2e-6]
