"""`tvmconv bench eight-bits`: its workloads and its table; the measurement needs a GPU."""

import tvmconv as tc
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
