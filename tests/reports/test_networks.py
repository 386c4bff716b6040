"""Networks, a line each."""

from dataclasses import replace

from tvmconv.devices import Timing
from tvmconv.experiments.results import Result, Row
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.networks import networks
from tvmconv.workloads import parse


def row(name, micros):
    return Row(name, timing=Timing((micros * 1e-6,), "by hand", False))


def network(name, kind, counts=(3, 1)):
    """Two layers, of which the network has three and one; cuDNN is faster for the second."""
    times = ((2, 1.0, 8.0), (4, 4.0, 2.0))
    results = [
        Result(parse(kind.format(channels)), "cuda:0", "a GPU", 0, (row("tuned", ours), row("cudnn", theirs)))
        for channels, ours, theirs in times
    ]
    return Sweep(name, ["a", "b"], results, "here", [*counts])


PLAIN = network("mine-tuned", "conv2d:1x{0}x6x6,4x{0}x1x1")
HALF = network("mine-f16-nhwc-b32-relu-tuned", "conv2d:32x{0}x6x6,4x{0}x1x1,f16,nhwc,relu")


def test_a_network_is_a_line_with_its_total_beside_the_library_s():
    table = networks([PLAIN, replace(PLAIN, name="other-3x3-tuned", counts=[])])
    assert table.rows == [
        ("mine", "f32", "nchw", "1", "cudnn", "2", "1", "2.00", "7.00", "26.0", "3.71"),
        ("other-3x3", "f32", "nchw", "1", "cudnn", "2", "1", "2.00", "—", "—", "—"),
    ]


def test_the_variant_has_columns_of_its_own_and_an_epilogue_stays_in_the_name():
    assert networks([HALF]).rows[0][:4] == ("mine-relu", "f16", "nhwc", "32")


def test_lines_are_sorted_by_name_dtype_and_batch():
    kinds = ("f16-nhwc-b32", "32x", ",f16,nhwc"), ("f16-nhwc-b2", "2x", ",f16,nhwc"), ("tf32", "1x", ",tf32")
    others = [
        network(f"mine-{name}-tuned", f"conv2d:{batch}{{0}}x6x6,4x{{0}}x1x1{rest}") for name, batch, rest in kinds
    ]
    found = networks([*others, replace(PLAIN, name="zoo-tuned"), PLAIN]).rows
    assert [line[:4] for line in found] == [
        ("mine", "f32", "nchw", "1"),
        ("mine", "tf32", "nchw", "1"),
        ("mine", "f16", "nhwc", "2"),
        ("mine", "f16", "nhwc", "32"),
        ("zoo", "f32", "nchw", "1"),
    ]


def test_layers_of_several_kinds_are_mixed():
    results = [PLAIN.results[0], HALF.results[1]]
    assert networks([replace(PLAIN, results=results)]).rows[0][:4] == ("mine", "mixed", "mixed", "mixed")


def test_filters_are_no_network():
    assert networks([network("filter1d-tuned", "filter1d:{0}00,k5")]).rows == []
