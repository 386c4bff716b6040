"""Networks, a line each."""

from dataclasses import replace

from tvmconv.devices import Timing
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.networks import make_networks_table
from tvmconv.workloads import parse


def row(name, micros):
    return ResultRow(name, timing=Timing((micros * 1e-6,), "by hand", False))


def network(name, kind, counts=(3, 1)):
    """Two layers, of which the network has three and one; cuDNN is faster for the second."""
    times = ((2, 1.0, 8.0), (4, 4.0, 2.0))
    results = [
        Result(parse(kind.format(channels)), "cuda:0", "a GPU", 0, (row("tuned", ours), row("cudnn", theirs)))
        for channels, ours, theirs in times
    ]
    return Sweep(name, ["a", "b"], results, "here", [*counts])


PLAIN = network("mine-tuned", "conv2d:1x{0}x6x6,4x{0}x1x1")


def test_a_network_is_a_line_with_its_total_beside_the_library_s():
    table = make_networks_table([PLAIN, replace(PLAIN, name="other-3x3-tuned", counts=[])])
    assert table.rows == [
        ("mine", "f32", "nchw", "1", "cudnn", "2", "1", "2.00", "7.00", "26.0", "3.71"),
        ("other-3x3", "f32", "nchw", "1", "cudnn", "2", "1", "2.00", "—", "—", "—"),
    ]


def test_lines_are_sorted_by_name_dtype_and_batch():
    kinds = ("f16-nhwc-b32", "32x", ",f16,nhwc"), ("f16-nhwc-b2", "2x", ",f16,nhwc"), ("tf32", "1x", ",tf32")
    others = [
        network(f"mine-{name}-tuned", f"conv2d:{batch}{{0}}x6x6,4x{{0}}x1x1{rest}") for name, batch, rest in kinds
    ]
    found = make_networks_table([*others, replace(PLAIN, name="zoo-tuned"), PLAIN]).rows
    assert [line[:4] for line in found] == [
        ("mine", "f32", "nchw", "1"),
        ("mine", "tf32", "nchw", "1"),
        ("mine", "f16", "nhwc", "2"),
        ("mine", "f16", "nhwc", "32"),
        ("zoo", "f32", "nchw", "1"),
    ]
