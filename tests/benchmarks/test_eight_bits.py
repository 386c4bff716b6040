"""`tvmconv bench eight-bits`: its workloads and its table; the measurement needs a GPU."""

import json

import pytest

import tvmconv as tc
from tvmconv import cli
from tvmconv.benchmarks.eight_bits import CUDNN, EightBitTimes, make_table, make_variant


def test_variants_have_results_in_float16():
    w = tc.parse("conv2d:2x16x8x8,8x16x3x3,s1,p1,bias,relu")
    variants = [make_variant(w, text).text.partition("p1,")[2] for text in ("f16", "i8")]
    assert variants == ["f16,nhwc", "out-f16,i8,nhwc,scale"]


def test_table_compares_8_bits_with_libraries():
    times = EightBitTimes("a", {"f16": 2e-6, "i8": 1e-6, CUDNN: 3e-6})
    table = make_table([times, EightBitTimes("b", {"f16": 2e-6})], ["i8"])
    assert table.rows[0] == ("`a`", "2.00", "1.00", "3.00", "—", "3.00", "2.00", "—")
    assert table.rows[2][-3:] == ("3.00", "2.00", "—")


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
